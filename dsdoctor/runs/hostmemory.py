"""Host memory during a run: what its processes hold, and what the machine or the control group still gives."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from dsdoctor.machine import cgroup
from dsdoctor.runs.facts import MemorySample

if TYPE_CHECKING:
    import psutil

_SAMPLES = 200
_RESERVE_SHARE, _RESERVE_BYTES = 0.03, 1 << 30
"""A run is stopped when less than this is left, and before the kernel picks a process to kill."""


class HostMemory:
    """Samples the memory of a run; `samples` is thinned to at most 200, evenly, and keeps the highest use."""

    def __init__(self, room: Callable[[], tuple[int, int]] | None = None) -> None:
        self._room = room or _room
        self._started = time.monotonic()
        self._kills_before = _oom_kills()
        self._samples: list[MemorySample] = []
        self._keep_every = 1
        self._seen = 0
        self._peak: MemorySample | None = None
        self.exhausted = False

    def sample(self, members: Iterable[psutil.Process]) -> None:
        """Take one sample; sets `exhausted` once the reserve is touched."""
        available, total = self._room()
        held = sum(_held(member.pid) for member in members)
        now = MemorySample(
            seconds=time.monotonic() - self._started, ranks_bytes=held, available_bytes=max(0, available)
        )
        if self._peak is None or held >= self._peak.ranks_bytes:
            self._peak = now
        self.exhausted = self.exhausted or available < min(_RESERVE_SHARE * total, _RESERVE_BYTES)
        self._keep(now)

    @property
    def samples(self) -> tuple[MemorySample, ...]:
        chosen = {sample.seconds: sample for sample in self._samples}
        if self._peak is not None:
            chosen[self._peak.seconds] = self._peak
        return tuple(chosen[seconds] for seconds in sorted(chosen))

    def oom_kills(self) -> int:
        """By how much the kernel's count of out-of-memory kills grew since the start."""
        return max(0, _oom_kills() - self._kills_before)

    def _keep(self, sample: MemorySample) -> None:
        if self._seen % self._keep_every == 0:
            self._samples.append(sample)
        self._seen += 1
        if len(self._samples) >= _SAMPLES - 1:  # leaves room for the peak
            self._samples = self._samples[::2]
            self._keep_every *= 2


def _held(pid: int) -> int:
    """Anonymous and shared memory of a process, in bytes. Pages of files are left out: the kernel can drop them."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
        wanted = (line.split() for line in text.splitlines() if line.startswith(("RssAnon:", "RssShmem:")))
        return sum(int(words[1]) << 10 for words in wanted)
    return 0


def _room() -> tuple[int, int]:
    """Bytes that are still to be had, and all there are: the narrower of machine and control group."""
    import psutil

    memory, swap = psutil.virtual_memory(), psutil.swap_memory()
    room = [(memory.available + swap.free, memory.total)]
    with contextlib.suppress(OSError):
        group = cgroup.read()
        if isinstance(group.limit, int) and group.used is not None:
            room.append((group.limit - group.used, min(group.limit, memory.total)))
    return min(room)


def _oom_kills() -> int:
    """The control group's count; the machine's where there is none (the top group of version 2 has no counter)."""
    with contextlib.suppress(OSError):
        count = cgroup.read().oom_kills
        if count is not None:
            return count
        return cgroup.parse_stat(Path("/proc/vmstat").read_text(encoding="utf-8")).get("oom_kill", 0)
    return 0
