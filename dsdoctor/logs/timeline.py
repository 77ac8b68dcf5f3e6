"""The story of the loss scale out of single overflow lines, or out of counters of skipped steps."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from dsdoctor.finding import Evidence
from dsdoctor.loss_scale import LossScaleHistory, ScaleAttempt, SkipCount

MAX_ATTEMPTS = 60_000
"""Overflows kept; of a log that has more, the last one too, and how many there were."""
MAX_RANKS = 2048
"""Ranks whose counters are kept."""
_ONE = re.compile(r"loss scale: 1\.0, reducing to 1\.0")
MIN_COUNTS = 8
"""Lines of a counter that are all kept; of later ones only the ends of a time in which it stands still."""
MAX_COUNTS = 4000
"""Lines of a counter kept of one rank; as they add up, every second one can be left out of a longer log."""


@dataclass(frozen=True, slots=True)
class Overflow:
    """One line about a skipped step. `scale` is None where the line has none (no loss scale is at work)."""

    step: int | None
    scale: float | None
    next_scale: float | None
    line: int
    source: str
    text: str
    bare: bool
    """The line has no prefix of a logger: a print of an old release, or a quotation."""


Printer = tuple[object, ...]
"""Who prints lines that tell one story: a rank of one attempt."""


class ScaleTimeline:
    """Collects overflow lines by the rank that printed them: every rank of a job sees the same overflows."""

    def __init__(self) -> None:
        self._by_rank: dict[Printer, list[Overflow]] = {}
        self._kept = 0
        self._unlisted = 0
        self._full = False
        self.iteration: int | None = None
        """The step that a line before named, where the lines about the scale do not."""

    def add(self, rank: Printer, overflow: Overflow) -> None:
        full = self._kept >= MAX_ATTEMPTS and not self._make_room()
        if rank not in self._by_rank and self._full:
            return
        lines = self._by_rank.setdefault(rank, [])
        if self.iteration is not None:
            overflow = _at(overflow, self.iteration)
            if lines and lines[-1].step is not None and lines[-1].step >= self.iteration:
                return  # another rank, or another wording, of the same
        elif lines and lines[-1].step is not None and overflow.step is not None and overflow.step <= lines[-1].step:
            if _same(lines[-1], overflow):
                return
            overflow = _at(overflow, lines[-1].step + 1)
        if full:
            lines[-1] = overflow
            self._unlisted += 1
            return
        lines.append(overflow)
        self._kept += 1

    def _make_room(self) -> bool:
        """Forget all ranks but the one that tells most; True if there is room then."""
        rank = max(self._by_rank, key=lambda rank: len(self._by_rank[rank]))
        self._by_rank = {rank: self._by_rank[rank]}
        self._kept, self._full = len(self._by_rank[rank]), True
        return self._kept < MAX_ATTEMPTS

    def unlisted(self, lines: list[Overflow]) -> int:
        """How many more overflows there were than these, which `lines` has given."""
        return self._unlisted if len(lines) == self._kept else 0

    def lines(self, precision: str | None, begins: int = 0) -> list[Overflow]:
        """The overflows from a line on, of the rank that tells most, without those that the precision rules out or
        that are quoted.
        """
        told = ([line for line in lines if line.line >= begins] for lines in self._by_rank.values())
        lines = max(told, key=len, default=[])
        if precision in ("bf16", "fp32"):
            lines = [line for line in lines if line.scale is None or line.scale == 1]
        if any(not line.bare for line in lines):
            lines = [line for line in lines if not line.bare]
        return lines


class SkipCounter:
    """Collects what counters of skipped steps say, by the rank that printed them, always as sums from the start."""

    def __init__(self) -> None:
        self._by_rank: dict[Printer, list[SkipCount]] = {}

    def add(self, key: Printer, count: SkipCount) -> None:
        """A line that says how many steps were skipped so far."""
        if len(self._by_rank) >= MAX_RANKS and key not in self._by_rank:
            return
        counts = self._by_rank.setdefault(key, [])
        if counts and count.step <= counts[-1].step:
            return
        if len(counts) > MIN_COUNTS and _stands_still(counts[-2], counts[-1], count):
            counts.pop()
        counts.append(count)
        if len(counts) > MAX_COUNTS:
            del counts[1:-1:2]

    def add_since(self, key: Printer, count: SkipCount) -> None:
        """A line that says how many steps were skipped since the line before."""
        counts = self._by_rank.get(key)
        self.add(key, replace(count, skipped=count.skipped + (counts[-1].skipped if counts else 0)))

    def counts(self, begins: int = 0) -> tuple[SkipCount, ...]:
        """Those from a line on, of the rank that tells most."""
        told = (tuple(one for one in counts if _line(one) >= begins) for counts in self._by_rank.values())
        return max(told, key=len, default=())


def _line(count: SkipCount) -> int:
    return (count.evidence.line or 0) if count.evidence is not None else 0


def _stands_still(*counts: SkipCount) -> bool:
    return len({(count.skipped, count.scale) for count in counts}) == 1


def history(
    lines: list[Overflow],
    *,
    unlisted: int = 0,
    counts: tuple[SkipCount, ...] = (),
    settings: Mapping[str, Any],
    precision: str | None,
    steps_seen: int | None,
    first_step: int | None,
    raised: Evidence | None,
    loss_finite: bool | None,
    ended: bool,
) -> LossScaleHistory | None:
    """The overflows as one history, None where nothing tells of any; `unlisted` is how many more there were.

    `raised` is the exception at the minimum scale, `settings` the fp16 section of the config in force; `counts` stand
    for the overflows where these have no lines of their own.
    """
    unscaled = bool(lines) and all(line.scale is None for line in lines)
    if precision is None and (_ones(lines) or (not lines and counts and all(count.scale == 1 for count in counts))):
        unscaled = True
    static = _number(settings.get("loss_scale")) or None
    attempts = [_attempt(line, static) for line in lines]
    if raised is not None:
        last = attempts[-1].next_scale if attempts else _number(settings.get("min_loss_scale")) or 1.0
        attempts.append(ScaleAttempt(step=raised.step, scale=last, next_scale=last, raised=True, evidence=raised))
    if not attempts and not _count_something(counts):
        return None
    known: Literal["fp16", "bf16", "fp32"] = "fp16"
    if precision in ("bf16", "fp32") or (unscaled and precision is None):
        known = "fp32" if precision == "fp32" else "bf16"
    power = _number(settings.get("initial_scale_power"))
    window, hysteresis = _number(settings.get("loss_scale_window")), _number(settings.get("hysteresis"))
    return LossScaleHistory(
        source=_source(lines, counts, raised),
        attempts=tuple(attempts),
        unlisted=unlisted,
        counts=() if attempts else counts,
        steps_seen=None if steps_seen is None else max(steps_seen, len(attempts) + unlisted),
        first_step=first_step,
        dynamic=static is None and not unscaled,
        precision=known,
        initial_power=None if power is None else int(power),
        window=None if window is None else int(window),
        hysteresis=None if hysteresis is None else int(hysteresis),
        floor=_number(settings.get("min_loss_scale")),
        loss_finite=loss_finite,
        ended=ended,
    )


def _ones(lines: list[Overflow]) -> bool:
    """True for the lines that scalers without a scale print in some releases: 1.0, reducing to 1.0, and never more.

    The oldest releases, known by "deepscale", had no such scalers; their dynamic one writes 1 at its floor.
    """
    same = all(line.scale == line.next_scale == 1 for line in lines)
    return bool(lines) and same and all(_ONE.search(line.text) and "deepscale" not in line.text for line in lines)


def _count_something(counts: tuple[SkipCount, ...]) -> bool:
    """True if a step was skipped, or a scale is at work (without one, 1.0 is printed)."""
    return any(count.skipped for count in counts) or any((count.scale or 0) > 1 for count in counts)


def _source(lines: list[Overflow], counts: tuple[SkipCount, ...], raised: Evidence | None) -> str:
    if lines:
        return lines[0].source
    if raised is not None:
        return raised.source
    return next((count.evidence.source for count in counts if count.evidence is not None), "")


def _attempt(line: Overflow, static: float | None) -> ScaleAttempt:
    scale = line.scale if line.scale is not None else static or 1.0
    following = line.next_scale if line.next_scale is not None else scale
    step = line.step
    proof = Evidence(source=line.source, line=line.line, step=step, text=line.text)
    return ScaleAttempt(step=step, scale=scale, next_scale=following, evidence=proof)


def _same(one: Overflow, other: Overflow) -> bool:
    """True for one overflow told twice: a scale that falls cannot fall from the same value again."""
    return one.scale == other.scale and one.next_scale == other.next_scale and one.scale != one.next_scale


def _at(overflow: Overflow, step: int) -> Overflow:
    return Overflow(
        step, overflow.scale, overflow.next_scale, overflow.line, overflow.source, overflow.text, overflow.bare
    )


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)
