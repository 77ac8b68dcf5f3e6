"""What a dynamic loss scale did, and what that means: pure arithmetic on attempts, for logs and runs alike."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from dsdoctor.finding import Evidence

Pattern = Literal["none", "warmup", "periodic", "outliers", "thrash", "collapse", "stuck"]
MINIMUM_REACHED = "Current loss scale already at minimum"
"""What DeepSpeed raises where its scale can fall no further."""


@dataclass(frozen=True, kw_only=True)
class ScaleAttempt:
    """One optimizer step that overflowed. `step` counts from 0 where it is known.

    `next_scale` equals `scale` where only hysteresis was used up, or where the scale is static. `raised` marks the
    attempt at the minimum that ended the run; that one is not a skipped step.
    """

    step: int | None
    scale: float
    next_scale: float
    raised: bool = False
    evidence: Evidence | None = None


@dataclass(frozen=True, kw_only=True)
class SkipCount:
    """What a counter says at one step: `skipped` steps so far among the first `step`, and the scale if it is told."""

    step: int
    skipped: int
    scale: float | None = None
    evidence: Evidence | None = None


@dataclass(frozen=True, kw_only=True)
class LossScaleHistory:
    """All overflows of one run or log, in order.

    `steps_seen` counts the attempted steps up to the last that was seen, None if unknown; `first_step` is the first one
    that the record shows, for a record whose beginning is missing. `window`, `hysteresis`, `floor`,
    `initial_power` come from the config in force, None where unknown. `loss_finite` tells whether the losses around
    the overflows were finite, None if no loss was seen.
    """

    source: str
    attempts: tuple[ScaleAttempt, ...]
    unlisted: int = 0
    """Skipped steps before the last attempt that are not listed, since there were too many of them."""
    counts: tuple[SkipCount, ...] = ()
    """Where only a counter of skipped steps is known, not the single overflows (`dsdoctor.skip_counts` reads them)."""
    steps_seen: int | None = None
    first_step: int | None = None
    dynamic: bool = True
    precision: Literal["fp16", "bf16", "fp32"] = "fp16"
    initial_power: int | None = None
    window: int | None = None
    hysteresis: int | None = None
    floor: float | None = None
    loss_finite: bool | None = None
    ended: bool = True
    """False where the log or run may go on (it was cut off)."""


@dataclass(frozen=True, kw_only=True)
class LossScaleReading:
    """What a history means. `settled_at` is the scale that held (the lower one where it rides the edge).

    `warmup_skips` counts the skipped steps of the search at the start; `late_share` is the share of the later steps
    that were skipped without the scale having grown just before, None where the number of steps is unknown.
    """

    pattern: Pattern
    skipped: int
    settled_at: float | None
    recommended_power: int | None
    recommended_precision: Literal["fp32", "fp16", "bf16"] | None
    warmup_skips: int = 0
    late_share: float | None = None


DEFAULT_HYSTERESIS = 2
DEFAULT_FLOOR = 1.0
SEARCH_GAP = 5
"""Clean steps that may lie between two overflows of the search at the start: the right scale moves with the batch."""
MANY = 5
"""Unexplained overflows from which on a history is no longer a matter of a few odd batches."""
THRASH_SHARE = 0.01
"""Share of later steps lost without a reason above which it is no longer odd batches."""
LONG_FALL = 3
"""Halvings in a row that no probe of a larger scale needs: it takes one."""
STUCK_SHARE = 0.05
STUCK_ATTEMPTS = 4


def read(history: LossScaleHistory, *, bf16_supported: bool | None = None) -> LossScaleReading:
    """Classify a history by the arithmetic of DeepSpeed's scaler.

    Each overflow uses one unit of hysteresis or halves the scale, down to the floor, where the run is ended (ZeRO) or
    goes on at the floor (without ZeRO); `window` clean steps double it. So overflows in one fall at the start are its
    search, overflows right after it has grown are its probes, and all others need an explanation.
    `bf16_supported` is what is known of the devices; it chooses between bf16 and fp32 as advice for a collapse.
    """
    attempts = history.attempts
    skipped = sum(not attempt.raised for attempt in attempts) + history.unlisted
    if not attempts:
        return reading("none", skipped)
    if not history.dynamic or history.precision != "fp16":
        return reading("stuck" if _often(history) else "outliers", skipped)
    if _collapsed(history):
        precision: Literal["fp32", "bf16"] = "fp32" if bf16_supported is False else "bf16"
        return reading("collapse", skipped, precision=None if history.loss_finite is False else precision)
    if _stuck(history):
        return reading("stuck", skipped)
    return _read_working_scaler(history, skipped)


def _read_working_scaler(history: LossScaleHistory, skipped: int) -> LossScaleReading:
    search = _search_length(history)
    later = history.attempts[search:]
    if not later:
        settled = _settled(history)
        return reading("warmup", skipped, settled_at=settled, power=_power(history, settled), warmup=search)
    unexplained = _unexplained(history, search)
    steps = None if history.steps_seen is None else max(1, history.steps_seen - search)
    share = None if steps is None else unexplained / steps
    if unexplained >= MANY and (share is None or share > THRASH_SHARE):
        return reading("thrash", skipped, warmup=search, share=share)
    settled = history.attempts[-1].next_scale
    power = _power(history, settled) if search else None
    pattern: Pattern = "periodic" if unexplained * 5 <= len(later) else "outliers"
    return reading(pattern, skipped, settled_at=settled, power=power, warmup=search, share=share)


def reading(
    pattern: Pattern,
    skipped: int,
    *,
    settled_at: float | None = None,
    power: int | None = None,
    precision: Literal["fp32", "fp16", "bf16"] | None = None,
    warmup: int = 0,
    share: float | None = None,
) -> LossScaleReading:
    """A reading in which only what the pattern has is said."""
    return LossScaleReading(
        pattern=pattern,
        skipped=skipped,
        settled_at=settled_at,
        recommended_power=power,
        recommended_precision=precision,
        warmup_skips=warmup,
        late_share=share,
    )


def _floor(history: LossScaleHistory) -> float:
    return DEFAULT_FLOOR if history.floor is None else history.floor


def _often(history: LossScaleHistory) -> bool:
    """True if overflows of a scale that cannot move cost more than a stray step."""
    count = len(history.attempts)
    if history.steps_seen is None:
        return count >= STUCK_ATTEMPTS
    return count > STUCK_SHARE * history.steps_seen


def _collapsed(history: LossScaleHistory) -> bool:
    """True if the scale fell to its floor and still overflowed there, to the end."""
    attempts = history.attempts
    if attempts[-1].raised:
        return True
    floor = _floor(history)
    at_floor = 0
    for attempt in reversed(attempts):
        if attempt.scale > floor or attempt.next_scale > floor:
            break
        at_floor += 1
    # The first overflow at the floor may only have used up hysteresis.
    return at_floor > max(1, (history.hysteresis or DEFAULT_HYSTERESIS) - 1) and not _recovered(history)


def _recovered(history: LossScaleHistory) -> bool:
    """True if the run went on for longer than the search may pause, after its last overflow."""
    last = history.attempts[-1].step
    return last is not None and history.steps_seen is not None and history.steps_seen - last - 1 > SEARCH_GAP


def _stuck(history: LossScaleHistory) -> bool:
    """True if the scale never moved although overflow followed overflow."""
    attempts = history.attempts
    patience = max(STUCK_ATTEMPTS, (history.hysteresis or DEFAULT_HYSTERESIS) + 1)
    same = all(a.scale == a.next_scale == attempts[0].scale for a in attempts)
    return same and len(attempts) >= patience and _often(history)


def _search_length(history: LossScaleHistory) -> int:
    """How many overflows belong to the search at the start: one fall, nearly without a pause.

    In a record whose beginning is missing the search is known by its length alone.
    """
    attempts = history.attempts
    first = attempts[0]
    begun = history.first_step or 0
    if first.step is not None and first.step - begun > SEARCH_GAP:
        return 0
    if first.step is None and history.initial_power is not None and first.scale != 2.0**history.initial_power:
        return 0
    length = 1
    while length < len(attempts) and _goes_on(attempts[length - 1], attempts[length]):
        length += 1
    halvings = sum(attempt.next_scale < attempt.scale for attempt in attempts[:length])
    return length if begun <= SEARCH_GAP or halvings >= LONG_FALL else 0


def _goes_on(before: ScaleAttempt, after: ScaleAttempt) -> bool:
    """True if `after` continues the fall of `before`."""
    if after.scale > before.next_scale:
        return False
    return before.step is None or after.step is None or after.step - before.step <= SEARCH_GAP + 1


def _settled(history: LossScaleHistory) -> float | None:
    """The scale that held after the search, None while nothing shows that it held."""
    last = history.attempts[-1]
    if history.steps_seen is None:
        return last.next_scale if history.ended else None
    clean = history.steps_seen - (len(history.attempts) if last.step is None else last.step + 1)
    return last.next_scale if clean > 0 else None


def _unexplained(history: LossScaleHistory, search: int) -> int:
    """How many overflows after the search did not come right after the scale had grown."""
    allowed = max(1, DEFAULT_HYSTERESIS if history.hysteresis is None else history.hysteresis)
    count = 0
    burst = 0
    for index in range(search, len(history.attempts)):
        if _grew_before(history, index):
            burst = allowed
        elif index > 0 and not _one_burst(history.attempts[index - 1], history.attempts[index]):
            burst = 0
        if burst > 0:
            burst -= 1
        else:
            count += 1
    return count


def _one_burst(before: ScaleAttempt, after: ScaleAttempt) -> bool:
    """True if both are about the same scale, or no clean step lies between the two, as far as is known."""
    if after.scale == before.scale:
        return True
    return before.step is None or after.step is None or after.step - before.step <= 1


def _grew_before(history: LossScaleHistory, index: int) -> bool:
    """True if the scale had doubled between this overflow and the one before, which takes `window` clean steps.

    Half of them are enough, because the steps of a log are as coarse as its lines about them. The first overflow after
    a clean beginning is taken for one where the start of the scale is not known.
    """
    attempt = history.attempts[index]
    if index == 0:
        if history.initial_power is None:
            return attempt.step is not None and attempt.step > SEARCH_GAP
        return attempt.scale > 2.0**history.initial_power
    before = history.attempts[index - 1]
    if attempt.scale <= before.next_scale:
        return False
    if history.window is None or attempt.step is None or before.step is None:
        return True
    return 2 * (attempt.step - before.step) >= history.window


def _power(history: LossScaleHistory, settled: float | None) -> int | None:
    """log2 of the scale that held, where starting there would have saved steps."""
    if settled is None or settled <= 0:
        return None
    start = history.attempts[0].scale if history.initial_power is None else 2.0**history.initial_power
    return math.floor(math.log2(settled)) if settled < start else None
