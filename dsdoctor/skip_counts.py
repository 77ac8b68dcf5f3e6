"""What a counter of skipped steps means where the overflow lines themselves are not in the log.

DeepSpeed prints `step=N, skipped=M`, Megatron `loss scale: S | number of skipped iterations: M`. Neither says which
steps were skipped nor, for DeepSpeed, at what scale, so only the shares of steps are judged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from dsdoctor.loss_scale import (
    DEFAULT_FLOOR,
    DEFAULT_HYSTERESIS,
    MANY,
    STUCK_ATTEMPTS,
    STUCK_SHARE,
    THRASH_SHARE,
    LossScaleHistory,
    LossScaleReading,
    Pattern,
    SkipCount,
    reading,
)

LONGEST_SEARCH = 34
"""Overflows from 2^32 down to 1 with hysteresis 2: who skips more steps in a row does not search any more."""
REGULAR_SHARE = 0.04
"""Share of skipped steps that a short `loss_scale_window` (50 and more) can cost with hysteresis 2."""


@dataclass(frozen=True)
class _Interval:
    """What happened between two lines of the counter."""

    end: int
    steps: int
    skipped: int
    scale: float | None

    @property
    def whole(self) -> bool:
        return self.steps > 0 and self.skipped >= self.steps


def read(history: LossScaleHistory, *, bf16_supported: bool | None = None) -> LossScaleReading:
    """Classify a history of which only `counts` are known.

    The skips of the first lines are the search for the scale. An end where every step is skipped, for longer than a
    search can last or at the smallest scale, is a collapse. What is skipped in between is thrash above a share that
    regular probes cannot reach.
    """
    parts = intervals(history.counts)
    skipped = sum(part.skipped for part in parts)
    last_scale = history.counts[-1].scale
    if skipped == 0:
        return reading("none", 0, settled_at=_above_one(last_scale))
    if history.precision != "fp16" or not history.dynamic:
        steps = sum(part.steps for part in parts)
        return reading("stuck" if skipped > STUCK_SHARE * steps else "outliers", skipped)
    if _collapsed(history, parts):
        precision: Literal["fp32", "bf16"] = "fp32" if bf16_supported is False else "bf16"
        return reading("collapse", skipped, precision=None if history.loss_finite is False else precision)
    return _after_search(history, parts, skipped)


def intervals(counts: Sequence[SkipCount]) -> list[_Interval]:
    """The intervals between the lines. A counter that was restored from a checkpoint starts at its first line."""
    before = SkipCount(step=0, skipped=0)
    first = counts[0]
    usual = counts[1].step - first.step if len(counts) > 1 else first.step
    if first.skipped > first.step or first.step > 2 * max(usual, 1):
        before = first
    parts = []
    for count in counts:
        if count.step > before.step:
            skipped = max(0, count.skipped - before.skipped)
            parts.append(_Interval(count.step, count.step - before.step, skipped, count.scale))
        before = count
    return parts


def _collapsed(history: LossScaleHistory, parts: Sequence[_Interval]) -> bool:
    """True if every step to the end is skipped and no lower scale is left to be tried.

    A scale that stands although more steps are skipped than hysteresis excuses is at its floor, whatever that is.
    """
    floor = DEFAULT_FLOOR if history.floor is None else history.floor
    patience = max(STUCK_ATTEMPTS, history.hysteresis or DEFAULT_HYSTERESIS)
    steps = standing = 0
    at_floor = False
    for part in reversed(parts):
        if not part.whole:
            break
        steps += part.steps
        at_floor = at_floor or (part.scale is not None and part.scale <= floor)
        standing += part.steps if part.scale is not None and part.scale == parts[-1].scale else 0
    return steps > 0 and (at_floor or standing > patience or steps > LONGEST_SEARCH)


def _after_search(history: LossScaleHistory, parts: Sequence[_Interval], skipped: int) -> LossScaleReading:
    search = _search(parts)
    found = sum(part.skipped for part in parts[:search])
    later = parts[search:]
    settled = _above_one(history.counts[-1].scale)
    late, steps = skipped - found, sum(part.steps for part in later)
    if late == 0:
        clean = steps > 0 or not parts[-1].whole
        held = settled if clean else None
        return reading("warmup", skipped, settled_at=held, power=_power(held), warmup=found)
    share = late / max(1, steps)
    if late >= MANY and share > THRASH_SHARE and not _regular(history, later, share):
        return reading("thrash", skipped, warmup=found, share=share)
    pattern: Pattern = "periodic" if late <= MANY or _regular(history, later, share) else "outliers"
    return reading(pattern, skipped, settled_at=settled, warmup=found, share=share)


def _search(parts: Sequence[_Interval]) -> int:
    """How many intervals the search takes: the first one, and those after it in which most steps are skipped."""
    length = 1
    while length < len(parts) and parts[length].skipped * 2 >= parts[length].steps:
        length += 1
    return length


def _regular(history: LossScaleHistory, later: Sequence[_Interval], share: float) -> bool:
    """True if the skips come as rarely, as evenly and as few at a time as probes of a larger scale do."""
    patience = max(1, DEFAULT_HYSTERESIS if history.hysteresis is None else history.hysteresis)
    if history.window is not None:
        return share <= 1.2 * patience / (history.window + 1 + patience)
    ends = [part.end for part in later if part.skipped]
    gaps = [after - before for before, after in pairwise(ends)]
    coarse = max(part.steps for part in later)
    even = not gaps or max(gaps) - min(gaps) <= 2 * coarse
    return (
        even and share <= REGULAR_SHARE and all(part.skipped <= patience * max(1, part.steps // 50) for part in later)
    )


def _above_one(scale: float | None) -> float | None:
    """The scale, where it is one: 1.0 is printed where none is at work."""
    return scale if scale is not None and math.isfinite(scale) and scale > 1 else None


def _power(settled: float | None) -> int | None:
    return None if settled is None else math.floor(math.log2(settled))
