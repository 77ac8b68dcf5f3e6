"""Limits of a run that count from when every rank is there: a busy machine may take long to start one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from dsdoctor.runs import supervise
from dsdoctor.runs.attendance import attendance_path
from dsdoctor.runs.spec import trace_path
from dsdoctor.runs.supervise import Limits
from dsdoctor.runs.watch import Watch


def count_from_the_begin(
    monkeypatch: pytest.MonkeyPatch, folder: Path, ranks: int, *, never_begin: Iterable[int] = ()
) -> None:
    """Ranks in `never_begin` have a process but never write a trace."""
    judge: Callable[[Watch, Limits, float], str | None] = supervise._to_be_ended
    silent = set(never_begin)
    begun_after: list[float] = []

    def begun(rank: int) -> bool:
        return (attendance_path if rank in silent else trace_path)(folder, rank).exists()

    def to_be_ended(watch: Watch, limits: Limits, seconds: float) -> str | None:
        if not begun_after:
            if not all(map(begun, range(ranks))):
                return None
            begun_after.append(seconds)
            watch.last_progress = time.monotonic()
        return judge(watch, limits, seconds - begun_after[0])

    monkeypatch.setattr(supervise, "_to_be_ended", to_be_ended)
