"""Inputs as users have them: each gives a clear message or what was readable, never a traceback."""

import gzip
import json
import os
import resource
import subprocess
import sys
import threading

import pytest

from dsdoctor.logs.read import read_logs
from dsdoctor.logs.source import find

TRACE = 'Traceback (most recent call last):\n  File "/home/u/train.py", line 7, in main\n    loss = step(x)\n{}\n'
OVERFLOW = (
    "[2024-03-20 12:15:47,438] [INFO] [loss_scaler.py:190:update_scale] [deepspeed] OVERFLOW! Rank 0 Skipping step. "
    "Attempted loss scale: {}, reducing to {}\n"
)


def log(*arguments, **more):
    command = [sys.executable, "-m", "dsdoctor", "log", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, timeout=120, check=False, **more)


def facts(tmp_path, data):
    path = tmp_path / "a.log"
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return read_logs([path])


def no_folder(tmp_path):
    return tmp_path / "none"


def empty_folder(tmp_path):
    return tmp_path


def folder_without_logs(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 100)
    (tmp_path / "core").write_bytes(b"\x7fELF\0\0\0")
    return tmp_path


def damaged(tmp_path):
    path = tmp_path / "a.log.gz"
    path.write_bytes(b"\x1f\x8b\x08\x00garbage")
    return path


def damaged_zst(tmp_path):
    path = tmp_path / "a.log.zst"
    path.write_bytes(b"\x28\xb5\x2f\xfdgarbage")
    return path


@pytest.mark.parametrize("make", [no_folder, empty_folder, folder_without_logs, damaged, damaged_zst])
@pytest.mark.parametrize("follow", [(), ("--follow",)])
def test_what_cannot_be_read_is_one_line_and_exit_code_2(tmp_path, make, follow):
    path = make(tmp_path)
    finished = log(path, *follow)
    assert finished.returncode == 2
    assert len(finished.stderr.splitlines()) == 1
    assert str(path).encode() in finished.stderr
    assert finished.stdout == b""


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_file_that_may_not_be_read(tmp_path):
    path = tmp_path / "a.log"
    path.write_text("x")
    path.chmod(0)
    assert b"Permission denied" in log(path).stderr


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "empty"),
        (b"\xff\xfe", "empty"),
        (b"\0" * 100_000, "no text"),
        (bytes(range(256)) * 1000, "no text"),
        (b"PK\x03\x04" + bytes(100), "unzip -p"),
        (b"BZh9" + bytes(100), "bzip2 -dc"),
        (b"\xfd7zXZ\x00" + bytes(100), "xz -dc"),
    ],
    ids=lambda one: one if isinstance(one, str) else one[:4].hex(),
)
def test_where_there_is_nothing_to_read_that_is_said(tmp_path, data, words):
    path = tmp_path / "a.log"
    path.write_bytes(data)
    finished = log(path, "--json")
    assert finished.returncode == 2
    assert words in finished.stderr.decode()
    assert len(finished.stderr.splitlines()) == 1
    document = json.loads(finished.stdout)
    assert (document["exit_code"], document["findings"]) == (2, [])


def test_bytes_before_a_log_do_not_hide_it(tmp_path):
    """What is left of a log that was cut back while a process wrote on."""
    got = facts(tmp_path, b"\0" * 100_000 + TRACE.format("KeyError: 'labels'").encode())
    assert (len(got.failures), got.unreadable) == (1, ())


def test_empty_files_beside_logs_are_nothing_to_speak_of(tmp_path):
    (tmp_path / "rank0.log").write_text("step 1 loss 2.0\n")
    (tmp_path / "rank1.log").write_text("")
    got = read_logs([tmp_path])
    assert (got.steps_seen, got.unreadable) == (1, ())


def test_a_file_that_vanishes_and_thousands_of_others(tmp_path, monkeypatch):
    for at in range(2000):
        (tmp_path / f"rank{at}.log").write_text(f"step {at} loss 2.0\n")
    found = find([tmp_path])
    monkeypatch.setattr("dsdoctor.logs.read.find", lambda paths: found)
    (tmp_path / "rank7.log").unlink()
    got = read_logs([tmp_path])
    assert (len(got.sources), got.steps_seen, len(got.unreadable)) == (2000, 1999, 1)


def test_a_hundred_megabytes_without_a_line_end_take_no_more_memory(tmp_path):
    path = tmp_path / "a.log"
    with path.open("wb") as stream:
        for _ in range(100):
            stream.write(b"0.123, " * 149_797)
        stream.write(b"\nstep 3 loss 1.0\n")

    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    finished = log(path, "--json")
    after = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    assert json.loads(finished.stdout)["understood"]["lines"] == 2
    assert json.loads(finished.stdout)["series"] == {"loss": [[3, 1.0]]}
    assert after == before or after < 200 * 1024


@pytest.mark.parametrize("named", ["-", "/dev/stdin", "pipe"])
def test_a_pipe_that_ends(tmp_path, named):
    text = (TRACE.format("KeyError: 'labels'")).encode()
    if named == "pipe":
        path = tmp_path / "pipe"
        os.mkfifo(path)
        threading.Thread(target=path.write_bytes, args=(text,), daemon=True).start()
        finished = log(path, "--json")
    else:
        finished = log(named, "--json", input=text)
    assert finished.returncode == 1
    assert "'labels'" in json.loads(finished.stdout)["findings"][0]["cause"]


def test_a_cut_off_gzip_gives_what_it_has(tmp_path):
    path = tmp_path / "a.log.gz"
    packed = gzip.compress((TRACE.format("KeyError: 'labels'") + "\n").encode() + os.urandom(100_000))
    path.write_bytes(packed[: len(packed) // 2])
    finished = log(path)
    assert finished.returncode == 1
    assert b"labels" in finished.stdout
    assert b"damaged or cut off" in finished.stdout


def test_zst(tmp_path):
    zstandard = pytest.importorskip("zstandard")
    path = tmp_path / "a.log.zst"
    frame = zstandard.ZstdCompressor().compress(b"step 1 loss 2.0\n")
    path.write_bytes(frame * 3)
    assert read_logs([path]).lines == 3


def test_escape_sequences_are_never_replayed(tmp_path):
    path = tmp_path / "a.log"
    hostile = "\x1b]0;title\x07\x1b[2J\x9b31m\x1b]52;c;aGk=\x07KeyError: '\x1b[31mred\x07\b\x1b[0m'"
    path.write_text(TRACE.format(hostile.replace("\x1b]0;title\x07", "")) + hostile)
    for finished in (log(path), log(path, "--json")):
        assert finished.returncode == 1
        assert not {0x1B, 0x07, 0x08} & set(finished.stdout)
        assert "\x9b" not in finished.stdout.decode()


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r\r\n"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le"])
def test_line_ends_and_encodings(tmp_path, end, encoding):
    text = "step 1 loss 2.0\n" + OVERFLOW.format(65536, 32768) + TRACE.format("KeyError: 'größe'")
    got = facts(tmp_path, text.replace("\n", end).encode(encoding))
    assert got.lines == 6
    assert [(f.type, f.message, f.line, len(f.frames)) for f in got.failures] == [("KeyError", "'größe'", 6, 1)]
    assert got.loss_scale.attempts[0].evidence.line == 2


@pytest.mark.parametrize("columns", [80, 97, 120])
def test_a_terminal_that_broke_lines_and_numbers(tmp_path, columns):
    text = "[2024-03-20 12:15:46,001] [INFO] [config.py:984:print]   zero_config ................ stage=2 bucket=500\n"
    text += "".join(OVERFLOW.format(2 ** (32 - at), 2 ** (31 - at)) for at in range(12))
    text += "{'loss': 2.7512, 'grad_norm': 0.8123456789012345, 'learning_rate': 4.9999968335030575e-05, 'epoch': 0.1}\n"
    text += TRACE.format("RuntimeError: The size of tensor a (1024) must match the size of tensor b (2048) at dim 1")
    lines = [line[at : at + columns] for line in text.splitlines() for at in range(0, max(len(line), 1), columns)]
    got = facts(tmp_path, "\n".join(lines) + "\n")
    assert got.lines == len(lines)
    assert [(a.scale, a.next_scale) for a in got.loss_scale.attempts] == [
        (2 ** (32 - at), 2 ** (31 - at)) for at in range(12)
    ]
    assert got.series_of("lr").points[0].value == 4.9999968335030575e-05
    assert got.failures[0].message.endswith("(2048) at dim 1")
    assert lines[got.failures[0].line - 1].startswith("RuntimeError")


def test_long_lines_of_equal_length_were_not_broken(tmp_path):
    line = "[2024-03-20 12:15:47,{:03d}] [INFO] [x.py:1:f] a message that is always as long as this one is here\n"
    text = "".join(line.format(at) for at in range(50)) + "step 1 loss 2.0\n"
    assert facts(tmp_path, text).series_of("loss").points[0].evidence.line == 51


def test_the_texts_of_two_ranks_in_one_line(tmp_path):
    """Two processes share a terminal, and the line ends come late."""
    zero = [f"[rank0]: {line}" for line in TRACE.format("KeyError: 'a'").splitlines()]
    one = [f"[rank1]: {line}" for line in TRACE.format("ValueError: b").splitlines()]
    got = facts(tmp_path, "".join(f"{a}{b}\n\n" for a, b in zip(zero, one, strict=True)))
    assert [(f.rank, f.type, f.message, len(f.frames)) for f in got.failures] == [
        (0, "KeyError", "'a'", 1),
        (1, "ValueError", "b", 1),
    ]


HEAD = TRACE.removesuffix("{}\n")


def boxed(lines, prefix=""):
    return "".join(f"{prefix}│ {line:<40} │\n" for line in lines)


def test_a_message_in_a_box_is_put_together(tmp_path):
    message = ("torch.OutOfMemoryError: CUDA out of", "memory. Tried to allocate 3.91 GiB. GPU", "3 is full", "x")
    head = "".join(f"[rank1]: {line}\n" for line in HEAD.splitlines())
    got = facts(tmp_path, head + boxed(message, "[rank1]: ") + "end\n")
    assert [(f.rank, f.line) for f in got.failures] == [(1, 4)]
    lines = got.failures[0].message.splitlines()
    assert lines == ["CUDA out of memory. Tried to allocate 3.91 GiB. GPU 3 is full", "x"]
    assert got.lines == 8


def test_a_word_or_number_cut_in_a_box(tmp_path):
    message = ("OSError: bad", "x" * 40, "yyy", "at 1234567890123456789 and 1234567890 12", "34 end")
    (failure,) = facts(tmp_path, HEAD + boxed(message)).failures
    assert failure.message == f"bad {'x' * 40}yyy\nat 1234567890123456789 and 1234567890 1234 end"


def test_lines_of_a_box_that_had_room_stay_apart(tmp_path):
    (failure,) = facts(tmp_path, HEAD + boxed(("ValueError: first", "second", "", "third"))).failures
    assert failure.message.splitlines()[:2] == ["first", "second"]


@pytest.mark.parametrize("columns", [80, 120])
def test_one_line_that_a_terminal_broke(tmp_path, columns):
    step = "{'loss': 2.7512, 'grad_norm': 0.8123456789012345, 'learning_rate': 4.9999968335030575e-05, 'epoch': 12.345}"
    step = step.replace("{", "{'entropy': 0.1234567890123456, ")
    lines = ["starting", *(step[at : at + columns] for at in range(0, len(step), columns)), "step 3 loss 1.0"]
    got = facts(tmp_path, "\n".join(lines) + "\n")
    assert got.series_of("lr").points[0].value == 4.9999968335030575e-05
    assert got.lines == 4
