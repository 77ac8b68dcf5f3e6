"""Inputs of a log: which files, in which order, and what their bytes become."""

import gzip
import io
import sys

import pytest

from dsdoctor.logs.source import BLOCK, Source, Unreadable, _whole_lines, blocks, find


def text(path):
    return b"".join(blocks(Source(name=str(path), path=path))).decode()


def test_a_folder_stands_for_its_logs_in_natural_order(tmp_path):
    for name in ("rank10.log", "rank9.log", "weights.bin", "notes.py", "ds.json", ".hidden.log"):
        (tmp_path / name).write_text("x\n")
    (tmp_path / "core.log").write_bytes(b"\0\1\2" * 50)
    found = find([tmp_path])
    assert [source.path.name for source in found] == ["rank9.log", "rank10.log"]
    assert [source.rank for source in found] == [9, 10]


def test_the_rank_is_in_torchruns_folder(tmp_path):
    (tmp_path / "attempt_0" / "3").mkdir(parents=True)
    (tmp_path / "attempt_0" / "3" / "stderr.log").write_text("x\n")
    assert find([tmp_path])[0].rank == 3


def test_what_is_not_there_is_said(tmp_path):
    with pytest.raises(Unreadable, match="no such file"):
        find([tmp_path / "no.log"])
    with pytest.raises(Unreadable, match="no log"):
        find([tmp_path])


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be"])
def test_encodings(tmp_path, encoding):
    path = tmp_path / "a.log"
    path.write_bytes("loss größer ✓\nsecond line\n".encode(encoding))
    assert text(path) == "loss größer ✓\nsecond line\n"


def test_gzip_is_known_by_its_bytes(tmp_path):
    path = tmp_path / "a.log"
    path.write_bytes(gzip.compress(b"one\ntwo\n"))
    assert text(path) == "one\ntwo\n"


def test_a_cut_off_gzip_gives_what_it_has_and_says_so(tmp_path):
    path = tmp_path / "a.log.gz"
    lines = b"".join(b"line %d of many\n" % i for i in range(200_000))
    packed = gzip.compress(lines)
    path.write_bytes(packed[: len(packed) // 2])
    got = []
    with pytest.raises(Unreadable, match="damaged or cut off"):
        got.extend(blocks(Source(name="a", path=path)))
    assert got


def test_zstd_without_a_module_is_a_clear_message(tmp_path, monkeypatch):
    for module in ("zstandard", "compression", "compression.zstd"):
        monkeypatch.setitem(sys.modules, module, None)
    path = tmp_path / "a.zst"
    path.write_bytes(b"\x28\xb5\x2f\xfd" + b"\0" * 20)
    with pytest.raises(Unreadable, match="pip install zstandard"):
        list(blocks(Source(name="a.zst", path=path)))


def test_frames_of_zstd_that_were_added_one_after_the_other(tmp_path):
    zstandard = pytest.importorskip("zstandard", reason="Python has a module of its own")
    path = tmp_path / "a.log.zst"
    path.write_bytes(b"".join(zstandard.compress(b"line %d\n" % at) for at in range(1000)))
    assert text(path) == "".join(f"line {at}\n" for at in range(1000))


def test_a_cut_off_zstd_gives_what_it_has_and_says_so(tmp_path):
    zstandard = pytest.importorskip("zstandard", reason="Python has a module of its own")
    path = tmp_path / "a.log.zst"
    packed = zstandard.compress(b"".join(b"line %d of many\n" % at for at in range(200_000)))
    path.write_bytes(packed[: len(packed) // 2])
    got = []
    with pytest.raises(Unreadable, match="damaged or cut off"):
        got.extend(blocks(Source(name="a", path=path)))
    assert got


def test_standard_input(monkeypatch):
    class Stream:
        buffer = io.BytesIO(b"one\ntwo")

    monkeypatch.setattr("sys.stdin", Stream())
    assert b"".join(blocks(find(["-"])[0])) == b"one\ntwo"


def test_blocks_end_at_line_ends():
    pieces = [b"one\ntw", b"o\nthr", b"ee"]
    assert list(_whole_lines(iter(pieces))) == [b"one\n", b"two\n", b"three"]


def test_an_endless_line_comes_in_pieces_of_bounded_size():
    half = b"x" * (BLOCK // 2)
    got = list(_whole_lines(iter([half] * 5)))
    assert b"".join(got) == half * 5
    assert max(map(len, got)) <= BLOCK
