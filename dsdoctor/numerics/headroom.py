"""How far each module's values are from the largest number of their type, and how fast they come nearer. No torch.

Headroom is counted in octaves: log2 of the limit over the largest magnitude. Growth in training is mostly a factor per
step, so a straight line through the octaves tells when a module would cross the limit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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
_STEPS_KEPT = 4096
"""Steps that are kept of a module; later ones are left out."""


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

    def _octaves(self, value: float) -> float:
        return math.log2(LIMITS[self.dtype] / value)


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
    """Hears of every frame of a rank and keeps the largest magnitudes by module and step."""

    def __init__(self) -> None:
        self._peaks: dict[str, dict[int, float]] = {}
        self._types: dict[str, str] = {}

    def hear(self, frame: Frame, step: int) -> None:
        """A module's call in that optimizer step."""
        for row in frame.rows:
            if row.range is None or row.note not in LIMITS or not row.label.startswith(("input", "output")):
                continue
            known = self._types.setdefault(frame.name, row.note)
            if LIMITS[row.note] < LIMITS[known]:
                self._types[frame.name] = row.note
            steps = self._peaks.setdefault(frame.name, {})
            if step in steps or len(steps) < _STEPS_KEPT:
                steps[step] = max(steps.get(step, 0.0), row.range.high)

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
