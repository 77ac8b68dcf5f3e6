"""How far each module's values are from the largest number of their type, and how fast they come nearer. No torch.

Headroom is counted in octaves: log2 of the limit over the largest magnitude. Growth in training is mostly a factor per
step, so a straight line through the octaves tells when a module would cross the limit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dsdoctor.numerics.frames import Frame

LIMITS = {"float16": 65504.0, "bfloat16": 3.3895313892515355e38, "float32": 3.4028234663852886e38}
_POINTS = 6
"""Steps that a slope needs."""
_WINDOW = 40
"""The last steps that it is taken from."""
_FIT = 0.7
"""Share of the variance that a straight line has to explain."""
_SOON = 500.0
"""Steps within which a crossing is worth a word."""
_CLOSE = 6.0
"""Octaves of headroom above which nothing is forecast, however steep the line."""
_STEPS_KEPT = 128
"""The last steps that are kept of a module."""
_AGAIN = 4.0
"""How much nearer a crossing has to come to be told again."""


@dataclass(frozen=True, kw_only=True)
class ModulePeaks:
    """The largest magnitude that a module took or made in each step, as (step, value). `dtype` is the narrowest type
    among them."""

    module: str
    dtype: str
    peaks: tuple[tuple[int, float], ...]

    @property
    def finite(self) -> tuple[tuple[int, float], ...]:
        return tuple((step, value) for step, value in self.peaks if math.isfinite(value) and value > 0)

    @property
    def octaves(self) -> float:
        """Headroom in the last step with finite values."""
        return self._octaves(self.finite[-1][1]) if self.finite else math.inf

    @property
    def slope(self) -> float | None:
        """Octaves lost a step over the last steps; None where they are too few or follow no line."""
        points = [(float(step), -self._octaves(value)) for step, value in self.finite[-_WINDOW:]]
        return _slope(points) if len(points) >= _POINTS else None

    @property
    def steps_left(self) -> float | None:
        """Steps until the limit is crossed if it goes on like this, None where it does not come nearer."""
        slope = self.slope
        return max(0.0, self.octaves) / slope if slope is not None and slope > 0 else None

    @property
    def crosses_soon(self) -> bool:
        """Only fp16 ends within reach of ordinary activations."""
        if self.dtype != "float16" or self.octaves > _CLOSE:
            return False
        left = self.steps_left
        return left is not None and left <= _SOON

    @property
    def forecast(self) -> str:
        """When it crosses, in words; for one that crosses."""
        return (
            f"{self.module or 'the model'} crosses the limit of {self.dtype} in about {self.steps_left:.0f} steps "
            f"if it goes on like this: {self.octaves:.1f} octaves of headroom are left"
        )

    def _octaves(self, value: float) -> float:
        return math.log2(LIMITS[self.dtype] / value)


def nearest(peaks: Iterable[ModulePeaks]) -> ModulePeaks | None:
    """The one that crosses its limit first, None where none does soon."""
    near = [one for one in peaks if one.crosses_soon]
    return min(near, key=lambda one: one.steps_left or 0.0, default=None)


def _slope(points: Sequence[tuple[float, float]]) -> float | None:
    """Least squares; None where the line explains too little of what the values do."""
    count = len(points)
    mean_x, mean_y = sum(x for x, _ in points) / count, sum(y for _, y in points) / count
    xx = sum((x - mean_x) ** 2 for x, _ in points)
    xy = sum((x - mean_x) * (y - mean_y) for x, y in points)
    yy = sum((y - mean_y) ** 2 for _, y in points)
    if xx == 0 or yy == 0 or xy * xy / (xx * yy) < _FIT:
        return None
    return xy / xx


class Recorder:
    """The largest magnitudes that a rank saw, by module and step, for the last steps of each module."""

    def __init__(self) -> None:
        self._peaks: dict[str, dict[int, float]] = {}
        self._types: dict[str, str] = {}
        self._told = math.inf

    def hear(self, frame: Frame, step: int) -> None:
        """A module's call in that optimizer step."""
        for row in frame.rows:
            if row.range is not None and row.label.startswith(("input", "output")):
                self.note(frame.name, row.note, row.range.high, step)

    def note(self, module: str, dtype: str, largest: float, step: int) -> None:
        """What a module took or made. The type's own largest number is left out: it marks a mask, or was clamped to."""
        limit = LIMITS.get(dtype)
        if limit is None or largest == limit:
            return
        known = self._types.setdefault(module, dtype)
        if limit < LIMITS[known]:
            self._types[module] = dtype
        steps = self._peaks.setdefault(module, {})
        steps[step] = max(steps.get(step, 0.0), largest)
        if len(steps) > _STEPS_KEPT:
            del steps[next(iter(steps))]

    def forecast(self) -> str | None:
        """What to warn of after a step: once, and again when it has come much nearer."""
        close = (self._of(name) for name, dtype in self._types.items() if dtype == "float16")
        near = nearest(close)
        if near is None or near.steps_left is None or near.steps_left > self._told / _AGAIN:
            return None
        self._told = max(1.0, near.steps_left)
        return near.forecast

    def _of(self, module: str) -> ModulePeaks:
        return ModulePeaks(module=module, dtype=self._types[module], peaks=tuple(self._peaks[module].items()))

    def to_list(self) -> list[dict[str, Any]]:
        return [
            {"module": name, "dtype": self._types[name], "peaks": sorted(steps.items())}
            for name, steps in self._peaks.items()
        ]


def from_list(values: Sequence[Mapping[str, Any]]) -> tuple[ModulePeaks, ...]:
    """What `Recorder.to_list` wrote."""
    return tuple(
        ModulePeaks(module=one["module"], dtype=one["dtype"], peaks=tuple((int(s), float(v)) for s, v in one["peaks"]))
        for one in values
    )
