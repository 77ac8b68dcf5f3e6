"""Loading a ds_config: what is wrong in the file is data, what cannot be read raises."""

import os

import pytest

from dsdoctor.dsconfig import ConfigUnreadable, load_config, load_data
from dsdoctor.dsconfig.schema import releases, table_release

TEXT = """{
  "train_batch_size": 8,
  "zero_optimization": {
    "stage": 3, "offload_param": {"device": "cpu"}
  }
}
"""


def write(folder, content):
    path = folder / "ds.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_values_and_positions(tmp_path):
    facts = load_config(write(tmp_path, TEXT), release="0.19.8", world_size=2)
    assert facts.data["zero_optimization"]["stage"] == 3
    place = facts.where("zero_optimization.offload_param.device")
    assert (place.line, place.column) == (4, 35)
    assert facts.source_lines[place.line - 1][place.column - 1 :].startswith('"device"')
    assert facts.value("zero_optimization.offload_param.device") == "cpu"
    assert facts.where("fp16") is None
    assert not facts.has("fp16.enabled")
    assert facts.syntax_error is None
    assert facts.json_error is None


def test_windows_line_ends_count_by_line_feeds(tmp_path):
    facts = load_config(write(tmp_path, TEXT.replace("\n", "\r\n")))
    assert facts.where("zero_optimization.stage").line == 4
    assert facts.source_lines[1] == '  "train_batch_size": 8,'


def test_a_dict_has_no_positions_and_is_not_changed():
    given = {"fp16": {"enabled": True}}
    facts = load_config(given)
    assert facts.value("fp16.enabled") is True
    assert facts.where("fp16.enabled") is None
    assert given == {"fp16": {"enabled": True}}


@pytest.mark.parametrize(
    ("content", "line", "words"),
    [
        ("", 1, "empty"),
        ("\n\n  \n", 1, "empty"),
        ("[1, 2]", 1, "a list"),
        ("42", 1, "a number"),
        ('{\n "a": 1\n', 3, "ends where"),
        ('{\n "a": "x\n}', 2, "line ends inside a string"),
        (b'{\n "a": "\xff"\n}', 2, "not UTF-8"),
        (TEXT.encode("utf-16"), 1, "UTF-16"),
    ],
)
def test_mistakes_are_data(tmp_path, content, line, words):
    facts = load_config(write(tmp_path, content))
    assert words in facts.syntax_error.message
    if words != "empty":
        assert facts.syntax_error.line == line
    assert facts.data == {}


def test_a_byte_order_mark_is_taken_as_deepspeed_takes_it(tmp_path):
    facts = load_config(write(tmp_path, b"\xef\xbb\xbf" + TEXT.encode()))
    assert facts.syntax_error is None
    assert facts.where("train_batch_size").line == 2
    assert facts.json_error is not None


def test_hjson_is_taken_and_the_json_mistake_is_kept(tmp_path):
    facts = load_config(write(tmp_path, '{\n  "train_batch_size": 8, // samples\n}'))
    assert facts.data == {"train_batch_size": 8}
    assert facts.json_error.line == 2


def test_duplicates_with_both_places(tmp_path):
    facts = load_config(write(tmp_path, '{"a": 1,\n "a": 2}'))
    (duplicate,) = facts.duplicates
    assert [(p.line, p.column) for p in duplicate.positions] == [(1, 2), (2, 2)]


def test_what_cannot_be_read_raises_one_line(tmp_path):
    for path in (tmp_path / "missing.json", tmp_path, "nul\0byte"):
        with pytest.raises(ConfigUnreadable) as caught:
            load_config(path)
        assert "\n" not in str(caught.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_raises(tmp_path):
    path = write(tmp_path, TEXT)
    path.chmod(0)
    with pytest.raises(ConfigUnreadable):
        load_config(path)


def test_a_huge_file_is_no_config(tmp_path):
    path = tmp_path / "weights.bin"
    with path.open("wb") as file:
        file.truncate(64 * 2**20)
    with pytest.raises(ConfigUnreadable, match="not a ds_config"):
        load_config(path)


def test_the_release_it_is_judged_by():
    assert load_config({}, release="0.19.8+cu121").table_release == "0.19.8"
    assert table_release("0.18.5") == "0.18.3"
    assert table_release("0.3.0") == releases()[0]
    assert table_release("99.0") == table_release("") == releases()[-1]


def test_arguments_of_hugging_face_only_for_its_trainer():
    args = ["--bf16", "--learning_rate=3e-4", "--per-device-train-batch-size", "8", "--report_to", "a", "b"]
    facts = load_config({}, framework="transformers", script_args=args)
    assert facts.hf_arguments == {
        "bf16": True,
        "learning_rate": 3e-4,
        "per_device_train_batch_size": 8,
        "report_to": ["a", "b"],
    }
    assert load_config({}, framework="deepspeed", script_args=args).hf_arguments is None


def test_the_data_alone(tmp_path):
    path = tmp_path / "ds_config.json"
    path.write_text('{"bf16": {"enabled": true}}')
    assert load_data(path) == {"bf16": {"enabled": True}}
    path.write_text('{"bf16": 1,\n "fp16" }')
    with pytest.raises(ConfigUnreadable, match=r"ds_config\.json: line 2, column 9: "):
        load_data(path)
