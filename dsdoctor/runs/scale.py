"""The history of the loss scale in a run of our own, from the steps that were traced."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from dsdoctor.finding import Evidence
from dsdoctor.loss_scale import LossScaleHistory, ScaleAttempt
from dsdoctor.runs.facts import EngineFacts, Failure, Step

_DEFAULT_POWER, _DEFAULT_WINDOW, _DEFAULT_HYSTERESIS = 16, 1000, 2
"""DeepSpeed's `fp16.initial_scale_power`, `loss_scale_window` and `hysteresis` (its runtime/constants.py)."""
_AT_MINIMUM = "loss scale already at minimum"


def history(
    source: str, facts: EngineFacts, steps: tuple[Step, ...], failure: Failure | None, *, ended: bool
) -> LossScaleHistory | None:
    """One rank's overflows (all ranks share them). None where no step told a loss scale.

    `failure` is the exception that ended the rank: DeepSpeed raises when it overflows at the smallest scale.
    """
    attempts = [_attempt(source, step) for step in steps if step.skipped and step.loss_scale is not None]
    if failure is not None and _AT_MINIMUM in failure.message:
        attempts.append(_last_attempt(source, facts, steps, failure))
    if not attempts and not any(step.loss_scale is not None for step in steps):
        return None
    fp16: dict[str, Any] = facts.config.get("fp16") or {}
    dynamic = facts.dynamic_loss_scale
    return LossScaleHistory(
        source=source,
        attempts=tuple(attempts),
        steps_seen=len(steps),
        dynamic=dynamic,
        precision=facts.precision,
        initial_power=int(fp16.get("initial_scale_power", _DEFAULT_POWER)) if dynamic else None,
        window=int(fp16.get("loss_scale_window", _DEFAULT_WINDOW)) if dynamic else None,
        hysteresis=int(fp16.get("hysteresis", _DEFAULT_HYSTERESIS)) if dynamic else None,
        floor=facts.min_loss_scale,
        loss_finite=_finite(loss for step in steps for loss in step.losses),
        ended=ended,
    )


def _attempt(source: str, step: Step) -> ScaleAttempt:
    scale = step.loss_scale or 0.0
    following = scale if step.next_scale is None else step.next_scale
    text = f"step {step.index} skipped: overflow at loss scale {scale:g}, next {following:g}"
    evidence = Evidence(source=source, text=text, step=step.index)
    return ScaleAttempt(step=step.index, scale=scale, next_scale=following, evidence=evidence)


def _last_attempt(source: str, facts: EngineFacts, steps: tuple[Step, ...], failure: Failure) -> ScaleAttempt:
    """The overflow that was refused, not skipped."""
    floor = 1.0 if facts.min_loss_scale is None else facts.min_loss_scale
    index = failure.step if failure.step is not None else len(steps)
    evidence = Evidence(source=source, text=failure.message, rank=failure.rank, step=index)
    return ScaleAttempt(step=index, scale=floor, next_scale=floor, raised=True, evidence=evidence)


def _finite(losses: Iterable[float]) -> bool | None:
    seen = list(losses)
    return all(math.isfinite(loss) for loss in seen) if seen else None
