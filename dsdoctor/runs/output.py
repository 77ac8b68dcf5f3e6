"""Keeps what a script prints within bounds: of a very long output the beginning and the end are kept.

The ranks write straight into files of the run's folder (so do their C++ and their children), each write at the file's
end wherever that is, so that a file can be cut while they write.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from io import FileIO
from pathlib import Path

MOST_BYTES = 64 << 20
_HEAD_BYTES, _TAIL_BYTES = 1 << 20, 4 << 20
_MARK = b"\n[dsdoctor: %d bytes of output are left out here]\n"
_MARKED = re.compile(rb"\n\[dsdoctor: (\d+) bytes of output are left out here\]\n")


def bound(paths: Iterable[Path]) -> None:
    """Cut each file that has grown beyond `MOST_BYTES`."""
    for path in paths:
        with contextlib.suppress(OSError):
            if path.stat().st_size > MOST_BYTES:
                _cut(path)


def _cut(path: Path) -> None:
    """Move the end of the file forward, up to its head, and cut it there.

    What is written between the last look at the size and the cut is lost: some microseconds' worth.
    """
    with open(path, "rb+", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        tail = _read(file, size - _TAIL_BYTES, _TAIL_BYTES)
        tail = tail[tail.find(b"\n") + 1 :]
        earlier = _MARKED.match(_read(file, _HEAD_BYTES, 100))  # of the cut before
        left_out = size - _HEAD_BYTES - len(tail)
        if earlier is not None:
            left_out += int(earlier[1]) - len(earlier[0])
        end = _HEAD_BYTES + os.pwrite(file.fileno(), _MARK % left_out + tail, _HEAD_BYTES)
        while added := _read(file, size, _TAIL_BYTES):
            size += len(added)
            end += os.pwrite(file.fileno(), added, end)
        file.truncate(end)


def _read(file: FileIO, offset: int, length: int) -> bytes:
    return os.pread(file.fileno(), length, offset)
