"""Quantities over the steps, thinned while they are read so that any length fits."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dsdoctor.finding import Evidence
from dsdoctor.logs.facts import Point, Series
from dsdoctor.logs.unwrap import unwrap

KEEP = 5000
"""Most points of a series that are handed out."""
_NON_FINITE_KEPT = 50
MAX_TEXT = 300


@dataclass(slots=True)
class _Raw:
    step: float | None
    value: float
    line: int
    source: str
    rank: int | None
    text: str | bytes


class SeriesBuilder:
    """One series in the making. Every n-th point is kept, n doubling as it grows; the ones that matter all are."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._stride = 1
        self._count = 0
        self._next = 0
        self._points: list[_Raw] = []
        self._special: list[_Raw] = []
        self._least: _Raw | None = None
        self._most: _Raw | None = None
        self._last: _Raw | None = None

    def add(
        self, step: float | None, value: float, line: int, source: str, rank: int | None, text: str | bytes
    ) -> None:
        """A value; `text` is its line, or the bytes of it with whatever was put around the line."""
        point = _Raw(step, value, line, source, rank, text)
        if self._count >= self._next:
            self._points.append(point)
            self._next = self._count + self._stride
        self._count += 1
        self._last = point
        if not math.isfinite(value):
            if len(self._special) < _NON_FINITE_KEPT:
                self._special.append(point)
        elif self._least is None or value < self._least.value:
            self._least = point
        if math.isfinite(value) and (self._most is None or value > self._most.value):
            self._most = point
        if len(self._points) > KEEP:
            self._next += (len(self._points) % 2) * self._stride
            self._points = self._points[::2]
            self._stride *= 2

    @property
    def thinned(self) -> bool:
        """True once not every value is kept any more."""
        return self._stride > 1

    def wanted(self, count: int) -> range:
        """Which of the next `count` values have to be added: all at first, every n-th of a long series."""
        return range(max(0, self._next - self._count), count, self._stride)

    def widened_by(self, value: float) -> bool:
        """True if this finite value lies beyond all so far, and so has to be added."""
        return self._least is None or self._most is None or not self._least.value <= value <= self._most.value

    @property
    def room_for_non_finite(self) -> int:
        """How many more values that are not finite have to be added."""
        return _NON_FINITE_KEPT - len(self._special)

    def passed(self, count: int) -> None:
        """So many values came that did not have to be added."""
        self._count += count

    def build(self, begins: int = 0) -> Series:
        """The series so far, from a line on."""
        chosen = self._points
        thinned = self._count > KEEP
        if thinned:
            chosen = self._points[:: -(-len(self._points) // (KEEP - _NON_FINITE_KEPT - 3))]
        extremes = [point for point in (self._least, self._most, self._last) if point is not None]
        unique = {id(point): point for point in (*chosen, *self._special, *extremes)}
        counting = (point for point in unique.values() if point.line >= begins)
        ordered = sorted(counting, key=lambda point: (point.source, point.line))
        return Series(name=self._name, points=tuple(map(_point, ordered)), thinned=thinned)


def _point(raw: _Raw) -> Point:
    step = None if raw.step is None else int(raw.step)
    text = raw.text if isinstance(raw.text, str) else unwrap(raw.text.decode("utf-8", "replace")).text[:MAX_TEXT]
    evidence = Evidence(source=raw.source, line=raw.line, rank=raw.rank, step=step, text=text)
    return Point(step=raw.step, value=raw.value, evidence=evidence)
