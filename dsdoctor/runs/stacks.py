"""Where the ranks stand: asks them for their stacks, and reads what Python's faulthandler writes."""

from __future__ import annotations

import contextlib
import linecache
import re
import time
from collections.abc import Iterable
from pathlib import Path

from dsdoctor.runs.attendance import STACK_REQUEST, read_attendance
from dsdoctor.runs.facts import Frame
from dsdoctor.runs.loops import loops_around
from dsdoctor.runs.spec import stack_path

_THREAD = re.compile(r"(?P<current>Current thread|Thread) 0x[0-9a-f]+.*\(most recent call first\):")
_FRAME = re.compile(r'\s+File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<function>.+)')
_FATAL = "Fatal Python error: "
_OURS = Path(__file__).resolve().parents[1]
_PLAYS_A_LIBRARY = _OURS / "runs" / "plain"
_ANSWER_SECONDS = 3.0


def request_stacks(folder: str | Path, request: str) -> None:
    """Ask all ranks for their stacks without waiting; `request` differs from that of the time before."""
    with contextlib.suppress(OSError):
        (Path(folder) / STACK_REQUEST).write_text(request, encoding="utf-8")


def ask(folder: str | Path, ranks: Iterable[int], request: str) -> None:
    """Ask the ranks for their stacks and wait for the answers, a few seconds at most.

    `request` differs from that of the time before. A rank that cannot answer is not waited for.
    """
    before = {rank: _size(folder, rank) for rank in ranks}
    request_stacks(folder, request)
    deadline = time.monotonic() + _ANSWER_SECONDS
    while time.monotonic() < deadline and not all(_answered(folder, rank, size) for rank, size in before.items()):
        time.sleep(0.05)
    time.sleep(0.1)  # what has begun to be written is finished


def read_stack(folder: str | Path, rank: int) -> tuple[Frame, ...]:
    """The last stack that `rank` wrote, outermost first; empty where it wrote none."""
    try:
        text = stack_path(folder, rank).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ()
    return parse(text)


def parse(text: str) -> tuple[Frame, ...]:
    """The main thread of the last dump, or the thread that crashed, without dsdoctor's own frames, outermost first.

    faulthandler writes a dump innermost frame first, all threads one below the other, the main thread last: it was
    created first, and new ones go to the head of the interpreter's list (CPython, Python/traceback.c). After a hundred
    threads it writes "..." and stops, so that the main thread is not known.

    >>> other = 'Thread 0x1 (most recent call first):\\n  File "q.py", line 9 in wait\\n'
    >>> main = 'Current thread 0x2 (most recent call first):\\n  File "a.py", line 7 in f\\n  File "a", line 9 in g\\n'
    >>> [frame.function for frame in parse(other + main)]
    ['g', 'f']
    """
    crashed = text.rfind(_FATAL)
    threads: list[tuple[bool, list[Frame]]] = []
    for line in text[max(0, crashed) :].splitlines():
        if heading := _THREAD.match(line):
            threads.append((heading["current"] != "Thread", []))
        elif line == "...":
            threads.append((False, []))
        elif threads and (found := _FRAME.match(line)):
            threads[-1][1].append(_frame(found))
    if crashed >= 0:
        threads = [thread for thread in threads if thread[0]]
    return tuple(frame for frame in reversed(threads[-1][1]) if not _ours(frame)) if threads else ()


def _frame(found: re.Match[str]) -> Frame:
    line = int(found["line"]) if found["line"].isdigit() else 0
    text = linecache.getline(found["file"], line).strip() if line else ""
    function = found["function"].strip()
    return Frame(file=found["file"], line=line, function=function, text=text, loops=loops_around(found["file"], line))


def _ours(frame: Frame) -> bool:
    """True for a frame of dsdoctor, and of Python's own start of a module (which is dsdoctor's, too)."""
    file = Path(frame.file)
    if file.is_relative_to(_OURS):
        return not file.is_relative_to(_PLAYS_A_LIBRARY)
    return frame.file == "<frozen runpy>" or file.name == "runpy.py"


def _size(folder: str | Path, rank: int) -> int:
    try:
        return stack_path(folder, rank).stat().st_size
    except OSError:
        return 0


def _answered(folder: str | Path, rank: int, size_before: int) -> bool:
    seen = read_attendance(folder, rank)
    if not seen.began or seen.over:
        return True
    return bool(seen.state) and (not seen.answers or _size(folder, rank) > size_before)
