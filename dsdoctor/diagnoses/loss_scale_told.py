"""How a loss scale's history is told: the lines that show it, numbers of steps, scales with their powers of two."""

from __future__ import annotations

import math

from dsdoctor.finding import Evidence
from dsdoctor.loss_scale import LossScaleHistory, ScaleAttempt, SkipCount


def proof(history: LossScaleHistory, *, skip: int = 0) -> tuple[Evidence, ...]:
    """The first, the second and the last overflow after the first `skip`; or where a counter of them grew."""
    if not history.attempts:
        return _counted(history, skip)
    attempts = history.attempts[skip:]
    chosen = [*attempts[:2], *attempts[2:][-1:]]
    return tuple(attempt.evidence or _in_words(history, attempt) for attempt in chosen)


def _counted(history: LossScaleHistory, skip: int) -> tuple[Evidence, ...]:
    """The lines at which the counter passes `skip`, and the last one at which it grew."""
    before = (SkipCount(step=0, skipped=0), *history.counts)
    grew = [now for old, now in zip(before, history.counts, strict=False) if now.skipped > old.skipped]
    chosen = [count for count in grew if count.skipped > skip]
    return tuple(count.evidence for count in [*chosen[:1], *chosen[1:][-1:]] if count.evidence is not None)


def _in_words(history: LossScaleHistory, attempt: ScaleAttempt) -> Evidence:
    text = f"overflow at scale {scale(attempt.scale)}, next {scale(attempt.next_scale)}"
    return Evidence(source=history.source, step=attempt.step, text=text)


def steps(count: int) -> str:
    """The start of a sentence about so many steps: `3 steps were`."""
    return "1 step was" if count == 1 else f"{count} steps were"


def scale(scale: float | None) -> str:
    """A scale with its power of two: `1024 (2^10)`."""
    if scale is None or scale <= 0:
        return str(scale)
    power = math.log2(scale)
    return f"{scale:.10g} (2^{power:.0f})" if power.is_integer() and power else f"{scale:.10g}"
