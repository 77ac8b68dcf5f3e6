from __future__ import annotations

import doctest
import mmap
import os
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from dsdoctor.runs import hostmemory, kernellog
from dsdoctor.runs.hostmemory import HostMemory

GIB = 1 << 30


@pytest.mark.parametrize(
    ("available", "total", "exhausted"),
    [
        (2 * GIB, 64 * GIB, False),
        (GIB // 2, 64 * GIB, True),  # 3 % of 64 GiB is more than the 1 GiB that is the most to keep
        (GIB // 2, 8 * GIB, False),  # 3 % of 8 GiB is 0.24 GiB
        (GIB // 5, 8 * GIB, True),
    ],
)
def test_reserve_is_three_percent_or_one_gibibyte(available: int, total: int, exhausted: bool) -> None:
    memory = HostMemory(room=lambda: (available, total))
    memory.sample([])
    assert memory.exhausted is exhausted


def test_memory_of_the_members_is_counted() -> None:
    memory = HostMemory(room=lambda: (8 * GIB, 64 * GIB))
    me = psutil.Process(os.getpid())
    memory.sample([me])
    block = mmap.mmap(-1, 64 << 20)
    block.write(b"x" * (64 << 20))
    memory.sample([me])

    before, after = (sample.ranks_bytes for sample in memory.samples)
    assert after - before == pytest.approx(64 << 20, rel=0.2)


def test_curve_is_thinned_and_keeps_its_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    held = iter([100 if index == 777 else 1 for index in range(2000)])
    monkeypatch.setattr(hostmemory, "_held", lambda pid: next(held))
    memory = HostMemory(room=lambda: (8 * GIB, 64 * GIB))
    for _ in range(2000):
        memory.sample([psutil.Process()])

    samples = memory.samples
    assert 50 <= len(samples) <= 200
    assert max(sample.ranks_bytes for sample in samples) == 100
    assert [s.seconds for s in samples] == sorted(s.seconds for s in samples)


def test_kills_before_the_run_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = iter([7, 9])
    monkeypatch.setattr(hostmemory.cgroup, "oom_kills", lambda: next(counts))
    memory = HostMemory(room=lambda: (GIB, GIB))
    memory.close()
    assert memory.oom_kills == 2


def test_swap_that_the_group_may_use_is_room_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel kills in a group only when its swap is full as well."""
    group = hostmemory.cgroup.Cgroup(version=2, limit=1000, used=900, swap=500, swap_used=100)
    monkeypatch.setattr(hostmemory.cgroup, "read", lambda: group)
    monkeypatch.setattr(psutil, "swap_memory", lambda: SimpleNamespace(free=GIB))
    assert hostmemory._room() == (500, 1000)


def test_memory_that_becomes_scarce_is_looked_at_more_often() -> None:
    left = iter([40, 10, 10, 10, 0])
    looks = []

    def room() -> tuple[int, int]:
        looks.append(next(left) * GIB)
        return looks[-1], 64 * GIB

    memory = HostMemory(room=room)
    memory.sample([])
    assert not memory.low
    memory.sample([])
    assert (memory.low, memory.exhausted) == (True, False)
    memory.rest(30)  # ends as soon as less than the reserve is left
    assert (memory.exhausted, len(looks)) == (True, 5)


def test_log_of_the_kernel_is_understood(tmp_path: Path) -> None:
    assert doctest.testmod(kernellog).failed == 0
    absent = kernellog.KernelLog(tmp_path / "absent")
    assert absent.kills() == ()
    absent.close()


def test_limit_of_the_control_group_counts_where_it_is_narrower(monkeypatch: pytest.MonkeyPatch) -> None:
    narrow = hostmemory.cgroup.Cgroup(version=2, limit=1000, used=900)
    monkeypatch.setattr(hostmemory.cgroup, "read", lambda: narrow)
    assert hostmemory._room() == (100, 1000)

    monkeypatch.setattr(hostmemory.cgroup, "read", lambda: hostmemory.cgroup.Cgroup(version=2, limit="unlimited"))
    assert hostmemory._room()[1] == psutil.virtual_memory().total


def test_process_that_is_gone_holds_nothing() -> None:
    assert hostmemory._held(2**22 + 1) == 0  # beyond the largest pid of Linux
