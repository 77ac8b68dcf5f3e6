"""Listens to the ranks of a run while it goes on: who has begun, how far they are, whether anything still moves."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsdoctor.runs.attendance import attendance_path, read_attendance
from dsdoctor.runs.spec import trace_path


@dataclass(kw_only=True)
class _Rank:
    """What was heard of one rank so far. `offset` is how much of its trace was read."""

    offset: int = 0
    sizes: tuple[int, ...] = ()
    training: bool = False
    completed: bool = False
    failed: bool = False
    over: bool = False
    steps: int = 0
    last_sign: float = field(default_factory=time.monotonic)


@dataclass(kw_only=True)
class Watch:
    """State of a run, brought up to date by `look`. Times are of the monotonic clock."""

    folder: Path
    ranks: int
    last_progress: float = field(default_factory=time.monotonic)
    decided: float | None = None
    """When it became certain how the run ends: all ranks are done, or one has failed."""

    def __post_init__(self) -> None:
        self._ranks = [_Rank() for _ in range(self.ranks)]

    def look(self) -> None:
        """Read what is new. Growth of any rank's trace or output is progress."""
        grown = [self._look_at(number, rank) for number, rank in enumerate(self._ranks)]
        if any(grown):
            self.last_progress = time.monotonic()
        if self.decided is None and self._is_decided():
            self.decided = time.monotonic()

    @property
    def all_began_training(self) -> bool:
        """Each rank has entered its first forward pass, or is past all work."""
        return all(rank.training or rank.completed or rank.over for rank in self._ranks)

    @property
    def steps(self) -> int:
        """Optimizer steps attempted by the rank that is furthest."""
        return max((rank.steps for rank in self._ranks), default=0)

    def quiet(self) -> dict[int, float]:
        """Seconds since each rank last wrote anything, to its trace or as output."""
        now = time.monotonic()
        return {number: now - rank.last_sign for number, rank in enumerate(self._ranks)}

    @property
    def outputs(self) -> tuple[Path, ...]:
        """The files with what the ranks print."""
        return tuple(path for number in range(self.ranks) for path in self._output_of(number))

    def _output_of(self, number: int) -> tuple[Path, ...]:
        return tuple(self.folder / f"{name}-rank{number}.txt" for name in ("stdout", "stderr"))

    def _is_decided(self) -> bool:
        if any(rank.failed for rank in self._ranks):
            return True
        return all(rank.completed or rank.over for rank in self._ranks)

    def _look_at(self, number: int, rank: _Rank) -> bool:
        trace, attendance = trace_path(self.folder, number), attendance_path(self.folder, number)
        sizes = tuple(_size(path) for path in (trace, attendance, *self._output_of(number)))
        if sizes == rank.sizes:
            return False
        for event in self._new_events(trace, rank):
            _take(rank, event)
        seen = read_attendance(self.folder, number)
        rank.over = seen.over
        rank.failed = rank.failed or (seen.exit_code not in (None, 0) and not rank.completed)
        rank.sizes = sizes
        rank.last_sign = time.monotonic()
        return True

    def _new_events(self, trace: Path, rank: _Rank) -> Iterator[dict[str, Any]]:
        """Whole lines that were added to the trace."""
        try:
            with open(trace, "rb") as file:
                file.seek(rank.offset)
                added = file.read()
        except OSError:
            return
        whole = added[: added.rfind(b"\n") + 1]
        rank.offset += len(whole)
        yield from _parsed(whole.splitlines())


def _parsed(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict):
            yield event


def _take(rank: _Rank, event: dict[str, Any]) -> None:
    kind = event.get("event")
    if kind == "enter":
        rank.training = True
    elif kind == "step":
        rank.training = True
        rank.steps += 1
    elif kind == "stop" or (kind == "finish" and event.get("code") == 0):
        rank.completed = True
    elif kind in ("failure", "finish"):
        rank.failed = not rank.completed


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
