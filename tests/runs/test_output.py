"""A file that another process goes on writing to, as ranks do."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from dsdoctor.runs import output

WRITER = """
import os, sys
file = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
for number in range(500_000):
    os.write(file, b"line %d of many\\n" % number)
    if number % 50_000 == 49_999:
        print("written", flush=True)
        sys.stdin.readline()
"""


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in (("MOST_BYTES", 1 << 18), ("_HEAD_BYTES", 1000), ("_TAIL_BYTES", 5000)):
        monkeypatch.setattr(output, name, size)


def test_beginning_and_end_of_a_long_output_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "stdout-rank0.txt"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], **pipes)
    for _ in writer.stdout:
        output.bound([path])
        assert path.stat().st_size < 10_000
        writer.stdin.write("\n")
        writer.stdin.flush()
    assert writer.wait() == 0

    lines = path.read_text().splitlines()
    assert (lines[0], lines[-1]) == ("line 0 of many", "line 499999 of many")
    (mark,) = [line for line in lines if line.startswith("[dsdoctor")]
    left_out = int(re.findall(r"\d+", mark)[0])
    written = sum(len(f"line {number} of many\n") for number in range(500_000))
    assert left_out + path.stat().st_size - len(f"\n{mark}\n") == written


def test_short_output_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "stderr-rank0.txt"
    path.write_text("x" * 1000)
    output.bound([path, tmp_path / "absent"])
    assert path.read_text() == "x" * 1000
