"""Losses and gradient norms of a log: the first bad one, zeros that stand for nan, norms that are frozen."""

from __future__ import annotations

import math

from dsdoctor.case import Case
from dsdoctor.diagnoses import context
from dsdoctor.logs.facts import LogFacts, Point, Series

ZEROS_THAT_COUNT = 3
"""Losses of exactly 0.0 in a row that are no accident."""
NEXT_TO_NOTHING = 0.05
"""A loss, or the norm of its gradients, below this is that of a task that is nearly learned by heart."""
NORMS_THAT_COUNT = 5
"""Gradient norms of exactly 0 in a row that are no accident."""
_STAYS_BAD = 3


def first_bad_point(case: Case, logs: LogFacts) -> tuple[str, Point | None, Point] | None:
    """The first non-finite loss, or gradient norm where no loss scale explains it, with the finite value before."""
    found: list[tuple[str, Point | None, Point]] = []
    for name in ("loss", "grad_norm") if _norm_counts(case, logs) else ("loss",):
        series = logs.series_of(name)
        points = series.points if series is not None else ()
        for before, point in zip((None, *points), points, strict=False):
            if not math.isfinite(point.value):
                found.append((f"the {name.replace('_', ' ')}", before, point))
                break
    return min(found, key=lambda item: item[2].evidence.line or 0, default=None)


def _norm_counts(case: Case, logs: LogFacts) -> bool:
    """True if a gradient norm that is not finite cannot be the search for a loss scale."""
    if any(history.precision == "fp16" for history in context.histories(case)):
        return False
    precision = context.precision(case)
    if precision is not None:
        return precision != "fp16"
    norms = logs.series_of("grad_norm")
    last = norms.points[-_STAYS_BAD:] if norms is not None else ()
    return len(last) == _STAYS_BAD and not any(math.isfinite(point.value) for point in last)


def zeros_at_the_end(loss: Series) -> tuple[Point, ...]:
    """The losses of exactly 0.0 that the series ends with."""
    count = 0
    for point in reversed(loss.points):
        if point.value != 0.0:
            break
        count += 1
    return loss.points[len(loss.points) - count :] if count else ()


def came_down(loss: Series, first: Point) -> bool:
    """True if the losses just before that one were next to nothing already: they went to 0 by themselves."""
    before = loss.points[: loss.points.index(first)][-ZEROS_THAT_COUNT:]
    return len(before) == ZEROS_THAT_COUNT and all(0 <= point.value < NEXT_TO_NOTHING for point in before)


def odd_norms(norms: Series | None, first: Point) -> str | None:
    """What is odd about the gradient norms from that line on: not finite, zero, or frozen."""
    values = _values_from(norms, first)
    if len(values) < ZEROS_THAT_COUNT:
        return None
    if all(not math.isfinite(value) for value in values):
        return "not finite"
    if all(value == 0 for value in values):
        return "0"
    return f"frozen at {values[0]:.6g}" if len(set(values)) == 1 else None


def small_norms(norms: Series, first: Point) -> bool:
    """True if the gradient norms from that line on are next to nothing: 0, or what rounding leaves of a small one."""
    return all(0 <= value < NEXT_TO_NOTHING for value in _values_from(norms, first))


def vanished(logs: LogFacts) -> tuple[Point, ...]:
    """The gradient norms of exactly 0 that a log ends with, where steps were applied and the loss is neither 0 nor nan.

    A learning rate that stands at 0 means that no step was applied, and its norm is a remainder.
    """
    norms, loss, rate = (logs.series_of(name) for name in ("grad_norm", "loss", "lr"))
    zeros = zeros_at_the_end(norms) if norms is not None else ()
    if len(zeros) < NORMS_THAT_COUNT or loss is None:
        return ()
    losses, rates = _values_from(loss, zeros[0]), _values_from(rate, zeros[0])
    learning = all(math.isfinite(value) and value != 0 for value in losses) and bool(losses)
    return zeros if learning and (not rates or any(rates)) else ()


def sentinel(norms: Series, first: Point) -> float | None:
    """The frozen norm if it is the square root of a small integer, which is how non-finite groups are counted."""
    values = set(_values_from(norms, first))
    if len(values) != 1:
        return None
    value = values.pop()
    near = math.isfinite(value) and value >= 1 and abs(value**2 - round(value**2)) < 1e-3 and round(value**2) <= 64
    return value if near else None


def _values_from(series: Series | None, first: Point) -> list[float]:
    line = first.evidence.line or 0
    points = series.points if series is not None else ()
    return [p.value for p in points if p.evidence.source == first.evidence.source and (p.evidence.line or 0) >= line]


def world_size(logs: LogFacts) -> int:
    sizes = [int(event.fields["size"]) for event in logs.of_kind("world-size") if event.fields.get("size")]
    return max([*sizes, len(logs.ranks)], default=0)
