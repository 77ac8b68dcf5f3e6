"""`dsdoctor memory` as a command: its document, its exit codes, what it refuses, what it does not import."""

import json
import subprocess
import sys

import pytest

from dsdoctor.cli.main import main
from dsdoctor.dsconfig import patch

LLAMA_7B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "intermediate_size": 11008,
    "vocab_size": 32000,
    "torch_dtype": "float16",
}
BF16 = {
    "train_micro_batch_size_per_gpu": 2,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW"},
    "zero_optimization": {"stage": 2},
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ds.json").write_text(json.dumps(BF16))
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_7B))
    return tmp_path


def document(capsys, *arguments: str):
    code = main(["memory", "ds.json", *arguments, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["exit_code"] == code
    return found


def test_the_document_has_what_the_contract_names(folder, capsys):
    found = document(capsys, "--model", ".", "--gpu", "8xA100-80G", "--host", "1TiB", "--seq", "1024")
    assert (found["command"], found["exit_code"], found["findings"]) == ("memory", 0, [])
    assert "verdict" not in found
    (current,) = [one for one in found["needs"] if one["current"]]
    assert (current["stage"], current["offload_optimizer"], current["offload_param"]) == (2, "none", "none")
    parts = {"weights", "gradients", "optimizer", "buffers", "activations", "overhead"}
    for place in (current["per_gpu"], current["per_host"]):
        assert sum(place[part] for part in parts) == place["total"] <= place["peak"]
    assert current["per_gpu"]["activations"] > 0
    assert current["per_host"]["init_peak"] > 8 * 2 * 6.7e9
    assert {one["cost_rank"] for one in found["needs"]} == set(range(1, len(found["needs"]) + 1))
    assert found["needs"][found["recommended"]]["fits"]


def test_what_does_not_fit_is_1_and_the_patch_leads_to_what_does(folder, capsys):
    machine = ("--gpu", "4x24GiB", "--host", "512GiB", "--seq", "512")
    found = document(capsys, "--model", "config.json", *machine)
    assert found["exit_code"] == 1
    (finding,) = found["findings"]
    assert (finding["id"], finding["severity"]) == ("memory/will-not-fit", "error")
    change = finding["fixes"][0]["patch"]
    assert change == found["patch"] == found["needs"][found["recommended"]]["patch"]
    (folder / "ds.json").write_text(json.dumps(patch.apply(BF16, change)))
    mended = document(capsys, "--model", "config.json", *machine)
    assert mended["exit_code"] == 0
    assert mended["needs"][mended["recommended"]]["current"]


def test_nothing_fits_but_more_hosts_would(folder, capsys):
    found = document(capsys, "--params", "7B", "--gpu", "2x12GiB", "--host", "64GiB", "--zero-init")
    assert found["recommended"] is None
    ranks = found["advice"]["ranks"]
    assert ranks > 2
    assert ranks % 2 == 0
    more = document(
        capsys, "--params", "7B", "--gpu", "2x12GiB", "--host", "64GiB", "--zero-init", "--nodes", str(ranks // 2)
    )
    assert more["recommended"] is not None


def test_the_largest_micro_batch_fits_and_one_more_does_not(folder, capsys):
    machine = ("--model", ".", "--gpu", "8xA100-80G", "--host", "1TiB", "--seq", "2048")
    most = document(capsys, *machine)["advice"]["micro_batch"]
    fits = []
    for count in (most, most + 1):
        found = document(capsys, *machine, "--micro-batch", str(count))
        fits += [one["fits"] for one in found["needs"] if one["current"]]
    assert fits == [True, False]


def test_units_are_echoed_as_they_were_read(folder, capsys):
    assert main(["memory", "ds.json", "--params", "1B", "--gpu", "2x80GB", "--host", "80GiB"]) == 0
    told = capsys.readouterr().out
    assert "2x80GB was read as 2 x 74.5 GiB a host" in told
    assert "80GiB was read as 80.0 GiB" in told


def test_a_full_disk_is_told_beforehand(folder, capsys, monkeypatch):
    import shutil

    usage = shutil.disk_usage(folder)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100 * 10**9))
    found = document(capsys, "--params", "7B", "--gpu", "8x80GiB", "--save-dir", "out/ckpt", "--keep", "2")
    assert [one["id"] for one in found["findings"]] == ["disk/full"]
    assert found["checkpoint"]["bytes"] == (2 + 4 + 8) * 7 * 10**9


def test_the_page_is_one_file_that_loads_nothing(folder, capsys):
    assert main(["memory", "ds.json", "--model", ".", "--gpu", "8x80GiB", "--seq", "512", "--html", "m.html"]) == 0
    page = (folder / "m.html").read_text()
    assert page.count("<svg") == 2
    assert "http" not in page.replace("http://www.w3.org", "")
    (folder / "mine.txt").write_text("mine")
    assert main(["memory", "ds.json", "--params", "1B", "--html", "mine.txt"]) == 2
    assert (folder / "mine.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--params=-7B"], "is no number above 0"),
        (["--params", "1e400"], "is no number above 0"),
        (["--params", "0"], "is no number above 0"),
        (["--params", "nan"], "is no number above 0"),
        (["--params", "7B", "--gpu", "8xFOO"], "FOO is neither a size"),
        (["--params", "7B", "--host=-3GiB"], "neither a size"),
        (["--params", "7B", "--model", "."], "not allowed with"),
        ([], "required"),
        (["--model", "org/not-there"], "downloads nothing"),
        (["--params", "1000", "--vocab", "99", "--hidden", "99"], "alone have"),
        (["--params", "1B", "--trainable", "2B"], "more than the model has"),
        (["--script", "gone.py"], "no such file: gone.py"),
    ],
)
def test_what_is_refused_is_2_in_one_line(folder, capsys, arguments, words):
    try:
        code = main(["memory", "ds.json", *arguments])
    except SystemExit as ended:
        code = ended.code
    captured = capsys.readouterr()
    assert (code, captured.out) == (2, "")
    assert words in captured.err


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"train_batch_size": 30}, "train_batch_size 30 does not divide by 8 ranks"),
        ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 3}}, "zero_hpz_partition_size 3"),
        ({"expert_parallel": {"enabled": True, "autoep_size": 5}}, "autoep_size 5"),
    ],
)
def test_a_world_size_that_does_not_divide(folder, capsys, change, words):
    (folder / "ds.json").write_text(json.dumps(BF16 | change))
    assert main(["memory", "ds.json", "--params", "7B", "--gpu", "8x80GiB"]) == 2
    assert words in capsys.readouterr().err


def test_neither_torch_nor_deepspeed_is_imported(folder):
    code = (
        "import sys; from dsdoctor.cli.main import main; "
        "main(['memory', 'ds.json', '--model', '.', '--gpu', '8x80GiB', '--host', '1TiB', '--seq', '512']); "
        "print(sorted({'torch', 'deepspeed', 'transformers', 'pydantic'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_from_python(folder):
    import dsdoctor

    analysis = dsdoctor.estimate_memory(BF16, "config.json", "8xA100-80G")
    assert analysis.to_dict()["needs"][0]["per_gpu"]["peak"] > 0
    assert analysis.exit_code == 0
    assert dsdoctor.estimate_memory("ds.json", 7e9, "1x24GiB").exit_code == 1


def test_a_live_module_from_python(folder):
    """6 layers of 8 x 8 with bias, one frozen, on the meta device, where DeepSpeed's own estimators count nothing."""
    torch = pytest.importorskip("torch")
    import dsdoctor

    with torch.device("meta"):
        model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(6)))
    model[0].requires_grad_(False)
    facts = dsdoctor.estimate_memory(BF16, model, "1x24GiB").memory
    assert (facts.parameters, facts.trainable) == (6 * 72, 5 * 72)


@pytest.mark.full
def test_a_script_is_run_until_it_hands_over_its_model(folder, capsys):
    """The packaged demo: its 34,592 parameters, counted where it calls DeepSpeed, against a described machine."""
    from pathlib import Path

    import dsdoctor

    demo = Path(dsdoctor.__file__).parent / "demo"
    (folder / "ds.json").write_text((demo / "ds_config_bf16.json").read_text())
    found = document(capsys, "--script", str(demo / "train.py"), "--gpu", "1x24GiB", "--host", "64GiB")
    assert found["parameters"] == 34_592
    assert found["exit_code"] == 0
