"""What there is to plot of a log: loss, gradient norm, learning rate and loss scale over the steps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from dsdoctor.logs.facts import LogFacts, Series
from dsdoctor.loss_scale import LossScaleHistory

ENOUGH = 8
"""Points from which on a curve shows more than its numbers."""
_TITLES = {"loss": "loss", "grad_norm": "gradient norm", "lr": "learning rate"}


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One quantity over the steps. `values` may be nan or inf; `skipped` are the steps that were not applied.

    `powers` marks a quantity that moves by factors (the loss scale), to be drawn by its logarithm.
    """

    title: str
    steps: tuple[float, ...]
    values: tuple[float, ...]
    skipped: tuple[float, ...] = ()
    powers: bool = False

    def __post_init__(self) -> None:
        if len(self.steps) != len(self.values) or not self.steps:
            raise ValueError("a curve has one value a step, and at least one")

    @property
    def finite(self) -> tuple[float, ...]:
        return tuple(value for value in self.values if math.isfinite(value))

    def height(self, value: float) -> float:
        """Where a finite value stands between the least (0) and the largest (1)."""
        least, most = self._drawn(min(self.finite)), self._drawn(max(self.finite))
        return 0.5 if most == least else (self._drawn(value) - least) / (most - least)

    def _drawn(self, value: float) -> float:
        return math.log2(value) if self.powers and value > 0 else value


def curves(logs: LogFacts) -> tuple[Curve, ...]:
    """The curves that have enough points to be worth drawing, the loss scale last."""
    found = [curve for curve in map(_of_series, logs.series) if curve is not None]
    found.extend(_loss_scale(logs))
    return tuple(curve for curve in found if len(curve.finite) >= ENOUGH or (curve.powers and len(curve.finite) > 1))


def _of_series(series: Series) -> Curve | None:
    title = _TITLES.get(series.name)
    if title is None or not series.points:
        return None
    steps = [point.step for point in series.points]
    return Curve(title=title, steps=_rising(steps), values=tuple(point.value for point in series.points))


def _rising(steps: Sequence[float | None]) -> tuple[float, ...]:
    """The steps as a horizontal axis; the places in the series where the log does not number them, or starts anew.

    What is told before the first bar has no number; it stands where the numbers begin.
    """
    first = next((step for step in steps if step is not None), None)
    unnumbered = next((at for at, step in enumerate(steps) if step is not None), len(steps))
    known = [step for step in (*[first] * unnumbered, *steps[unnumbered:]) if step is not None]
    if len(known) == len(steps) and all(a <= b for a, b in pairwise(known)) and known[0] < known[-1]:
        return tuple(known)
    return tuple(float(index) for index in range(len(steps)))


def _loss_scale(logs: LogFacts) -> Iterator[Curve]:
    history = logs.loss_scale
    if history is not None and history.attempts and history.precision == "fp16":
        yield _of_attempts(history)
        return
    series = logs.series_of("loss_scale")
    if series is not None and series.points and any(point.value > 1 for point in series.points):
        steps = _rising([point.step for point in series.points])
        skipped = _counted(history) if history is not None else ()
        values = tuple(point.value for point in series.points)
        yield Curve(title="loss scale", steps=steps, values=values, skipped=skipped, powers=True)


def _of_attempts(history: LossScaleHistory) -> Curve:
    """The scale before and after each overflow, and on to the last step that was seen."""
    steps: list[float] = []
    values: list[float] = []
    for index, attempt in enumerate(history.attempts):
        step = float(index if attempt.step is None else attempt.step)
        steps += [step, step]
        values += [attempt.scale, attempt.next_scale]
    skipped = tuple(steps[::2])
    if history.steps_seen is not None and history.steps_seen > steps[-1]:
        steps.append(float(history.steps_seen))
        values.append(values[-1])
    return Curve(title="loss scale", steps=tuple(steps), values=tuple(values), skipped=skipped, powers=True)


def _counted(history: LossScaleHistory) -> tuple[float, ...]:
    """The steps at which a counter of skipped steps grew."""
    before = 0
    grew = []
    for count in history.counts:
        if count.skipped > before:
            grew.append(float(count.step))
        before = count.skipped
    return tuple(grew)
