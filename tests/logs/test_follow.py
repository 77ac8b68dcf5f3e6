"""Logs that grow while they are read."""

import contextlib
import gzip
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import pytest

from dsdoctor.logs.follow import Follower
from dsdoctor.logs.read import Unreadable

TRACE = 'Traceback (most recent call last):\n  File "/home/u/t.py", line 1, in f\n    x\nKeyError: {}\n'


def add(path, text):
    with path.open("a") as stream:
        stream.write(text)


def test_what_is_added_is_read_and_lines_go_on(tmp_path):
    path = tmp_path / "a.log"
    add(path, "step 1 loss 2.0\nstep 2 lo")
    follower = Follower([path])
    assert follower.poll()
    assert not follower.poll()
    assert follower.facts().lines == 2
    add(path, "ss 1.5\nstep 3 loss 1.0\n")
    assert follower.poll()
    points = follower.facts().series_of("loss").points
    assert [(p.step, p.value, p.evidence.line) for p in points] == [(1, 2.0, 1), (2, 1.5, 2), (3, 1.0, 3)]


def test_looking_changes_nothing(tmp_path):
    """An exception whose message is still coming is told, and told whole when it is complete."""
    path = tmp_path / "a.log"
    add(path, TRACE.format(1).rstrip("\n"))
    follower = Follower([path])
    follower.poll()
    assert [f.message for f in follower.facts().failures] == ["1"]
    assert follower.facts() == follower.facts()
    add(path, "23\nmore of it\n")
    follower.poll()
    assert [f.message for f in follower.facts().failures] == ["123\nmore of it"]


def test_a_file_that_is_rotated(tmp_path):
    path = tmp_path / "a.log"
    add(path, "step 1 loss 2.0\n")
    follower = Follower([path])
    follower.poll()
    path.rename(tmp_path / "a.log.1")
    add(tmp_path / "a.log.1", "step 2 loss 1.9\n")
    assert follower.poll()
    add(path, "step 3 loss 1.8\n")
    assert follower.poll()
    got = follower.facts()
    assert [(p.step, p.evidence.line) for p in got.series_of("loss").points] == [(1, 1), (3, 1), (2, 2)]
    assert got.lines == 3


def test_a_file_that_is_cut_back(tmp_path):
    path = tmp_path / "a.log"
    add(path, "step 1 loss 2.0\nstep 2 loss 1.9\n")
    follower = Follower([path])
    follower.poll()
    path.write_text("step 3 loss 1.8\n")
    assert follower.poll()
    assert follower.facts().steps_seen == 3


def test_a_folder_gets_another_file(tmp_path):
    add(tmp_path / "rank0.log", "step 1 loss 2.0\n")
    follower = Follower([tmp_path])
    follower.poll()
    add(tmp_path / "rank1.log", TRACE.format(1))
    assert follower.poll()
    assert [f.rank for f in follower.facts().failures] == [1]


def test_a_pipe_ends(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_text, args=("step 1 loss 2.0\nlast",), daemon=True)
    writer.start()
    follower = Follower([path])
    deadline = time.monotonic() + 10
    while not follower.ended and time.monotonic() < deadline:
        follower.poll()
        time.sleep(0.01)
    assert follower.ended
    assert (follower.facts().steps_seen, follower.facts().lines) == (1, 2)


def test_a_compressed_file_cannot_grow(tmp_path):
    path = tmp_path / "a.log.gz"
    path.write_bytes(gzip.compress(b"step 1 loss 2.0\n"))
    follower = Follower([path])
    assert follower.ended
    assert follower.facts().steps_seen == 1


def test_nothing_to_follow(tmp_path):
    with pytest.raises(Unreadable):
        Follower([tmp_path / "none.log"])


def wait_until_open(process: subprocess.Popen, path: pathlib.Path) -> None:
    """Until the process reads that file; starting Python takes its time on a busy machine."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            if path in map(pathlib.Path.readlink, pathlib.Path(f"/proc/{process.pid}/fd").iterdir()):
                return
        time.sleep(0.05)


def test_the_command_tells_each_finding_once_and_ends_on_ctrl_c(tmp_path):
    path = tmp_path / "a.log"
    add(path, "step 1 loss 2.0\n")
    command = [sys.executable, "-m", "dsdoctor", "log", "--follow", str(path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    told: list[str] = []
    reader = threading.Thread(target=lambda: told.extend(iter(process.stdout.readline, "")), daemon=True)
    reader.start()
    try:
        wait_until_open(process, path)
        add(path, "[rank0]: " + TRACE.format("'labels'").replace("\n", "\n[rank0]: ") + "\n")
        deadline = time.monotonic() + 30
        while not any("KeyError" in line for line in told) and time.monotonic() < deadline:
            time.sleep(0.05)
        add(path, "text\n")
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 3
    finally:
        process.kill()
    reader.join(10)
    at_once = subprocess.run([*command[:4], str(path)], capture_output=True, text=True, timeout=60, check=False)
    assert at_once.returncode == 1
    assert sorted(told) == sorted(at_once.stdout.splitlines(keepends=True))
    assert process.stderr.read() == ""


def test_a_document_is_printed_once_at_the_end(tmp_path):
    """Whatever came while it followed, and through a rotation, stdout holds one document."""
    path = tmp_path / "a.log"
    add(path, "step 1 loss 2.0\n")
    command = [sys.executable, "-m", "dsdoctor", "log", "--follow", "--json", str(path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        wait_until_open(process, path)
        path.rename(tmp_path / "a.log.1")
        add(path, "[rank0]: " + TRACE.format("'labels'").replace("\n", "\n[rank0]: ") + "\n")
        wait_until_open(process, path)
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=30)
    finally:
        process.kill()
    document = json.loads(output)
    assert (process.returncode, document["exit_code"], errors) == (3, 3, "")
    assert document["understood"]["steps_seen"] == 1
    assert [finding["id"] for finding in document["findings"]] == ["launch/user-exception"]


def test_a_document_of_a_pipe_that_ends():
    command = [sys.executable, "-m", "dsdoctor", "log", "--follow", "--json", "-"]
    finished = subprocess.run(command, input=TRACE.format(1), capture_output=True, text=True, timeout=60, check=False)
    assert (finished.returncode, json.loads(finished.stdout)["exit_code"]) == (1, 1)
