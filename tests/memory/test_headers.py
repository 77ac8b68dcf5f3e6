"""Headers of safetensors files: real ones, and damaged ones of every kind."""

import json
import struct

import pytest

from dsdoctor.memory.headers import HeaderUnreadable, files_of, of_files, of_index, read


def written(path, header, *, body: int = 0, length: int | None = None):
    text = json.dumps(header).encode() if not isinstance(header, bytes) else header
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + bytes(body))
    return path


def entry(shape, begin, end, dtype="BF16"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_a_file_that_the_library_wrote(tmp_path):
    """Names, sizes and dtypes are those that the library itself saves; buffers are no parameters."""
    torch = pytest.importorskip("torch")
    save_file = pytest.importorskip("safetensors.torch").save_file
    tensors = {
        "model.embed_tokens.weight": torch.zeros(7, 3, dtype=torch.bfloat16),
        "model.layers.0.mlp.experts.1.w1.weight": torch.zeros(5, dtype=torch.float32),
        "model.rotary_emb.inv_freq": torch.zeros(4),
        "scalar": torch.zeros((), dtype=torch.float16),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    found = {one.name: one for one in of_files([tmp_path / "model.safetensors"])}
    assert {name: (one.elements, one.loaded, one.expert) for name, one in found.items()} == {
        "model.embed_tokens.weight": (21, 2.0, False),
        "model.layers.0.mlp.experts.1.w1.weight": (5, 4.0, True),
        "scalar": (1, 2.0, False),
    }


@pytest.mark.parametrize(
    ("header", "body", "length", "words"),
    [
        (b"{}", 0, 10**15, "header's length is wrong"),
        (b"{}", 0, 0, "header's length is wrong"),
        (b"not json", 0, None, "header is no JSON"),
        (b"[" * 100_000, 0, None, "header is no JSON"),
        (b"[1, 2]", 0, None, "header is no object"),
        ({"a": entry([4], 0, 8)}, 4, None, "cut-off"),
        ({"a": entry([4], 0, 6)}, 8, None, "cut-off"),
        ({"a": entry([-4], 0, 8)}, 8, None, "the entry of a"),
        ({"a": entry([True], 0, 2)}, 8, None, "the entry of a"),
        ({"a": entry([2**40, 2**40], 0, 8)}, 8, None, "cut-off"),
        ({"a": {"shape": [1]}}, 8, None, "the entry of a"),
        ({"a": entry([1], 0, 2, "Q7")}, 8, None, "the entry of a"),
        ({"a": 7}, 8, None, "the entry of a"),
    ],
)
def test_damaged_files_are_said_to_be(tmp_path, header, body, length, words):
    path = written(tmp_path / "x.safetensors", header, body=body, length=length)
    with pytest.raises(HeaderUnreadable, match=words):
        list(read(path))


@pytest.mark.parametrize("content", [b"", b"abc", b"\x00" * 8])
def test_what_is_too_short_for_a_header(tmp_path, content):
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(HeaderUnreadable, match="not a safetensors file"):
        list(read(tmp_path / "x.safetensors"))


def test_the_weights_themselves_are_not_read(tmp_path):
    """A sparse file that claims a terabyte is answered from its first bytes."""
    path = written(tmp_path / "x.safetensors", {"a": entry([2**39], 0, 2**40)})
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + 2**40)
    (one,) = read(path)
    assert one.elements == 2**39


def test_an_index_names_each_file_once(tmp_path):
    for name in ("a", "b"):
        written(tmp_path / f"{name}.safetensors", {name: entry([1], 0, 2)}, body=2)
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "a.safetensors", "a2": "a.safetensors", "b": "b.safetensors"}})
    )
    assert [path.name for path in files_of(tmp_path)] == ["a.safetensors", "b.safetensors"]


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ({"weight_map": {"a": "gone.safetensors"}}, "gone.safetensors, which is not beside it"),
        ({"weight_map": {"a": "../elsewhere.safetensors"}}, "which is not beside it"),
        ({"weights": {}}, "not an index"),
        ([], "not an index"),
        ({"weight_map": 3}, "not an index"),
    ],
)
def test_an_index_that_leads_nowhere(tmp_path, index, words):
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps(index))
    with pytest.raises(HeaderUnreadable, match=words):
        of_index(path)
