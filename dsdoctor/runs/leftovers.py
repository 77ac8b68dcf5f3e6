"""What a run could leave on the machine beside its processes: marked processes elsewhere, and shared memory."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

from dsdoctor.runs.spec import RUN_MARKER

_SHARED_MEMORY = Path("/dev/shm")
_LOOKS = 5
"""How often the processes are searched for the maker of a new name; another program's file never gets one."""


def marked_pids(folder: Path) -> set[int]:
    """Processes of this user, living anywhere, whose environment says that they belong to the run in `folder`."""
    mark = f"{RUN_MARKER}={folder}".encode()
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # ended meanwhile, or of another user
            if process.stat().st_uid == os.getuid() and mark in (process / "environ").read_bytes().split(b"\0"):
                found.add(int(process.name))
    return found - {os.getpid()}


class SharedMemory:
    """Segments in /dev/shm that processes of a run made: found while those live, removed when they have ended.

    A segment counts as the run's if it is new since `__init__`, belongs to this user and was seen mapped or open in one
    of the run's processes. What another program made meanwhile is never touched.
    """

    def __init__(self, root: Path = _SHARED_MEMORY) -> None:
        self._root = root
        self._before = self._names()
        self._looked: dict[str, int] = {}
        self._ours: set[str] = set()

    def look(self, pids: Iterable[int], *, again: bool = False) -> None:
        """Find out which new names belong to `pids`. Cheap while there are none; `again` is for the last look."""
        new = self._names() - self._before - self._ours
        open_names = {name for name in new if again or self._looked.get(name, 0) < _LOOKS}
        if not open_names:
            return
        for name in open_names:
            self._looked[name] = self._looked.get(name, 0) + 1
        for pid in pids:
            self._ours |= open_names & self._held_by(pid)

    def remove(self) -> tuple[str, ...]:
        """Remove the run's segments that are still there; their names."""
        removed = []
        for name in sorted(self._ours & self._names()):
            path = self._root / name
            with contextlib.suppress(OSError):
                if path.lstat().st_uid == os.getuid():
                    path.unlink()
                    removed.append(name)
        return tuple(removed)

    def _names(self) -> set[str]:
        try:
            return set(os.listdir(self._root))
        except OSError:
            return set()

    def _held_by(self, pid: int) -> set[str]:
        """Names below the root that `pid` has mapped or open."""
        paths: set[str] = set()
        with contextlib.suppress(OSError):
            maps = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace")
            paths.update(line.split(maxsplit=5)[5] for line in maps.splitlines() if line.count("/") > 0)
        with contextlib.suppress(OSError):
            for descriptor in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    paths.add(os.readlink(f"/proc/{pid}/fd/{descriptor}"))
        start = f"{self._root}/"
        return {path[len(start) :].split("/")[0] for path in paths if path.startswith(start)}
