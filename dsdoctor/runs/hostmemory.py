"""Host memory during a run: what its processes hold, and what the machine or the control group still gives."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from dsdoctor.machine import cgroup
from dsdoctor.runs.facts import MemorySample, OomKill
from dsdoctor.runs.kernellog import KernelLog

if TYPE_CHECKING:
    import psutil

_SAMPLES = 200
_RESERVE_SHARE, _RESERVE_LEAST, _RESERVE_MOST = 0.03, 128 << 20, 1 << 30
"""A run is stopped when less than this is left: before the kernel picks a process to kill, which may be dsdoctor."""
_LOW_SHARE = 0.2
"""Below this share of all memory (and below twice the reserve), the room is looked at more often: ranks fill some
gigabytes in a second."""
_GLANCE = 0.02


class HostMemory:
    """Samples the memory of a run; `samples` is thinned to at most 200, evenly, and keeps the highest use.

    `low` says that memory has become scarce since the first look, `exhausted` that the reserve was touched. `oom_kills`
    and `kernel_kills` are what the kernel did between the making of this and `close`.
    """

    def __init__(self, room: Callable[[], tuple[int, int]] | None = None) -> None:
        self._room = room or _room
        self._started = time.monotonic()
        self._kills_before = cgroup.oom_kills()
        self._kernel = KernelLog()
        self._samples: list[MemorySample] = []
        self._keep_every = 1
        self._seen = 0
        self._peak: MemorySample | None = None
        self._ample = False
        self.oom_kills = 0
        self.kernel_kills: tuple[OomKill, ...] = ()
        self.low = False
        self.exhausted = False

    def sample(self, members: Iterable[psutil.Process]) -> None:
        """Take one sample of the room and of what the members hold."""
        available = self._look()
        held = sum(_held(member.pid) for member in members)
        now = MemorySample(
            seconds=time.monotonic() - self._started, ranks_bytes=held, available_bytes=max(0, available)
        )
        if self._peak is None or held >= self._peak.ranks_bytes:
            self._peak = now
        self._keep(now)

    def rest(self, seconds: float) -> None:
        """Sleep so long; where memory is scarce with an eye on it, and only until it is exhausted."""
        deadline = time.monotonic() + seconds
        while not self.exhausted and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, _GLANCE) if self.low else left)
            if self.low:
                self._look()

    @property
    def samples(self) -> tuple[MemorySample, ...]:
        chosen = {sample.seconds: sample for sample in self._samples}
        if self._peak is not None:
            chosen[self._peak.seconds] = self._peak
        return tuple(chosen[seconds] for seconds in sorted(chosen))

    def close(self) -> None:
        """Take stock of the kills: what the kernel counted, and what its log says."""
        self.oom_kills = max(0, cgroup.oom_kills() - self._kills_before)
        self.kernel_kills = self._kernel.kills()
        self._kernel.close()

    def _look(self) -> int:
        available, total = self._room()
        reserve = min(max(_RESERVE_SHARE * total, _RESERVE_LEAST), _RESERVE_MOST)
        scarce = available < max(_LOW_SHARE * total, 2 * reserve)
        self._ample = self._ample or not scarce
        self.low = self.low or (scarce and self._ample)
        self.exhausted = self.exhausted or available < reserve
        return available

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
    """Bytes that are still to be had, and all there are: the narrower of machine and control group, swap included."""
    import psutil

    memory, swap = psutil.virtual_memory(), psutil.swap_memory()
    room = [(memory.available + swap.free, memory.total)]
    with contextlib.suppress(OSError):
        group = cgroup.read()
        if isinstance(group.limit, int) and group.used is not None:
            room.append((group.limit - group.used + _swap(group, swap.free), min(group.limit, memory.total)))
    return min(room)


def _swap(group: cgroup.Cgroup, free: int) -> int:
    """Swap that the group may still use: it is killed only when that is gone too."""
    return min(free, max(0, group.swap - (group.swap_used or 0))) if isinstance(group.swap, int) else free
