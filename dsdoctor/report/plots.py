"""Curves as a few lines of text: one row of blocks each, with the skipped steps under it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

from dsdoctor.report.curves import Curve

WIDTH = 60
"""Columns of a plot."""
_BLOCKS = "▁▂▃▄▅▆▇█"
_NOT_FINITE = "×"
_SKIPPED = "!"


def drawable(encoding: str | None) -> bool:
    """True if a stream of that encoding can show the blocks."""
    try:
        (_BLOCKS + _NOT_FINITE).encode(encoding or "ascii")
    except (LookupError, UnicodeEncodeError):
        return False
    return True


def lines(curve: Curve, *, width: int = WIDTH) -> Iterator[str]:
    """The title with its range, the row of blocks, and a row of marks where steps were skipped."""
    columns = _columns(curve, width)
    least, most = min(curve.finite), max(curve.finite)
    notes = [f"{_number(curve, least)} to {_number(curve, most)}", f"steps {curve.steps[0]:g} to {curve.steps[-1]:g}"]
    if any(not math.isfinite(value) for value in curve.values):
        notes.append(f"{_NOT_FINITE} not finite")
    if curve.skipped:
        notes.append(f"{_SKIPPED} skipped")
    yield f"{curve.title} ({', '.join(notes)})"
    yield "  " + "".join(_block(curve, values) for values in columns)
    if curve.skipped:
        yield "  " + _marks(curve, width)


def _columns(curve: Curve, width: int) -> list[list[float]]:
    columns: list[list[float]] = [[] for _ in range(width)]
    for step, value in zip(curve.steps, curve.values, strict=True):
        columns[_column(curve, step, width)].append(value)
    for before, column in pairwise(columns):
        column.extend(before[-1:] if not column else ())  # what has not been told anew still holds
    return columns


def _number(curve: Curve, value: float) -> str:
    power = math.log2(value) if curve.powers and value > 0 else 0.5
    return f"2^{power:.0f}" if power.is_integer() else f"{value:.6g}"


def _column(curve: Curve, step: float, width: int) -> int:
    first, last = curve.steps[0], curve.steps[-1]
    share = (step - first) / (last - first) if last > first else 0.0
    return min(width - 1, max(0, int(share * width)))


def _block(curve: Curve, values: list[float]) -> str:
    """The mean of a column; a value that is not finite shows through."""
    if any(not math.isfinite(value) for value in values):
        return _NOT_FINITE
    height = sum(map(curve.height, values)) / len(values)
    return _BLOCKS[min(len(_BLOCKS) - 1, int(height * len(_BLOCKS)))]


def _marks(curve: Curve, width: int) -> str:
    marked = {_column(curve, step, width) for step in curve.skipped}
    return "".join(_SKIPPED if column in marked else " " for column in range(width)).rstrip()
