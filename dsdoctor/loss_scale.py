"""What a dynamic loss scale did, and what that means: pure arithmetic on attempts, for logs and runs alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dsdoctor.finding import Evidence

Pattern = Literal["none", "warmup", "periodic", "outliers", "thrash", "collapse", "stuck"]


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
class LossScaleHistory:
    """All overflows of one run or log, in order.

    `steps_seen` counts the attempted steps that were seen, None if unknown. `window`, `hysteresis`, `floor`,
    `initial_power` come from the config in force, None where unknown. `loss_finite` tells whether the losses around
    the overflows were finite, None if no loss was seen.
    """

    source: str
    attempts: tuple[ScaleAttempt, ...]
    steps_seen: int | None = None
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
    """What a history means. `settled_at` is the scale that held (the lower one where it rides the edge)."""

    pattern: Pattern
    skipped: int
    settled_at: float | None
    recommended_power: int | None
    recommended_precision: Literal["fp32", "fp16", "bf16"] | None


def read(history: LossScaleHistory) -> LossScaleReading:
    """Classify a history. (To be written out: see the owner's module.)"""
    raise NotImplementedError
