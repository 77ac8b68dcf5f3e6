"""What the kernel says of processes that it killed for lack of memory, where its log may be read."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from dsdoctor.runs.facts import OomKill

_KMSG = Path("/dev/kmsg")
_RECORD_BYTES = 8192
"""A record of /dev/kmsg is never longer (CONSOLE_EXT_LOG_MAX of the kernel)."""
_KILLED = re.compile(r"(?:[Oo]ut of memory|oom-kill).*?: Killed process (?P<pid>\d+) \((?P<name>.*?)\)")


class KernelLog:
    """Follows the log from now on. Needs a right that containers seldom have; without it there is nothing to read.

    Closed by `close`; each record is read once.
    """

    def __init__(self, path: Path = _KMSG) -> None:
        self._descriptor = -1
        with contextlib.suppress(OSError):
            self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            os.lseek(self._descriptor, 0, os.SEEK_END)

    def kills(self) -> tuple[OomKill, ...]:
        """The kills since the last call (or since this was made)."""
        return tuple(kill for record in self._records() if (kill := parse(record)) is not None)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _records(self) -> Iterator[str]:
        while self._descriptor >= 0:
            try:
                record = os.read(self._descriptor, _RECORD_BYTES)
            except BrokenPipeError:  # records were overwritten before they were read; the next read goes on after them
                continue
            except OSError:  # nothing more for now
                return
            if not record:
                return
            yield record.decode("utf-8", errors="replace")


def parse(record: str) -> OomKill | None:
    """One record as an OomKill, None for any other.

    >>> parse("3,871,9,-;Memory cgroup out of memory: Killed process 71 (python3) total-vm:9kB, anon-rss:8kB").pid
    71
    >>> parse("6,872,9,-;oom_reaper: reaped process 71 (python3), now anon-rss:0kB")
    """
    text = record.partition(";")[2].partition("\n")[0]
    found = _KILLED.search(text)
    return OomKill(pid=int(found["pid"]), name=found["name"], text=text.strip()) if found else None
