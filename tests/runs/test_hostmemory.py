from __future__ import annotations

import mmap
import os

import psutil
import pytest

from dsdoctor.runs import hostmemory
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
    monkeypatch.setattr(hostmemory, "_oom_kills", lambda: next(counts))
    assert HostMemory(room=lambda: (GIB, GIB)).oom_kills() == 2


def test_limit_of_the_control_group_counts_where_it_is_narrower(monkeypatch: pytest.MonkeyPatch) -> None:
    narrow = hostmemory.cgroup.Cgroup(version=2, limit=1000, used=900)
    monkeypatch.setattr(hostmemory.cgroup, "read", lambda: narrow)
    assert hostmemory._room() == (100, 1000)

    monkeypatch.setattr(hostmemory.cgroup, "read", lambda: hostmemory.cgroup.Cgroup(version=2, limit="unlimited"))
    assert hostmemory._room()[1] == psutil.virtual_memory().total


def test_process_that_is_gone_holds_nothing() -> None:
    assert hostmemory._held(2**22 + 1) == 0  # beyond the largest pid of Linux
