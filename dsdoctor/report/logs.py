"""The sections that `dsdoctor log` adds to the JSON document: the loss scale and the series."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dsdoctor.case import Case
from dsdoctor.diagnoses import context
from dsdoctor.logs.series import KEEP
from dsdoctor.loss_scale import LossScaleHistory, LossScaleReading, ScaleAttempt


def sections(case: Case) -> dict[str, Any]:
    """`loss_scale` and `series`, as far as the logs have them; `understood` says what was made use of."""
    logs = case.logs
    if logs is None:
        return {}
    built: dict[str, Any] = {
        "understood": {
            "sources": list(logs.sources),
            "lines": logs.lines,
            "ranks": list(logs.ranks),
            "steps_seen": logs.steps_seen,
            "end": logs.end,
            "unreadable": list(logs.unreadable),
        },
        "series": {series.name: [[point.step, point.value] for point in series.points] for series in logs.series},
    }
    if any(series.thinned for series in logs.series):
        built["thinned"] = True
    if logs.loss_scale is not None:
        built["loss_scale"] = _loss_scale(logs.loss_scale, context.read(case, logs.loss_scale))
    return built


def _loss_scale(history: LossScaleHistory, reading: LossScaleReading) -> dict[str, Any]:
    attempts = history.attempts
    built = {
        "attempts": [[a.step, a.scale, a.next_scale] for a in _thin(attempts)],
        "skipped": reading.skipped,
        "settled_at": reading.settled_at,
        "initial_power": history.initial_power,
        "recommended_initial_scale_power": reading.recommended_power,
        "recommended_precision": reading.recommended_precision,
        "steps_seen": history.steps_seen,
    }
    return {**built, "thinned": True} if len(attempts) > KEEP else built


def _thin(attempts: tuple[ScaleAttempt, ...]) -> Iterable[ScaleAttempt]:
    """At most `KEEP` of them: the first, the last and the extremes are among them."""
    if len(attempts) <= KEEP:
        return attempts
    stride = -(-len(attempts) // (KEEP - 3))
    extremes = (min(attempts, key=lambda a: a.scale), max(attempts, key=lambda a: a.scale), attempts[-1])
    chosen = {id(attempt) for attempt in (*attempts[::stride], *extremes)}
    return [attempt for attempt in attempts if id(attempt) in chosen]
