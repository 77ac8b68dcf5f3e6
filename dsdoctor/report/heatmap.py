"""The largest magnitude of each module in each step, as a table of colours. It loads nothing and holds no script."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from dsdoctor.numerics.headroom import LIMITS, ModulePeaks

_MOST_ROWS = 300
"""Modules shown; those with the least headroom, in the order of the forward."""
_MOST_COLUMNS = 60
_OCTAVES = 16.0
"""Headroom from which on a cell is blank."""
_STYLE = "border-collapse:collapse;font-size:11px"


def heatmap(peaks: Sequence[ModulePeaks]) -> str:
    """A heading and a table: a row a module, a column a step, redder the nearer a value is to its type's limit."""
    shown = _rows(peaks)
    steps = _columns(shown)
    head = "".join(f"<th>{step}</th>" for step in steps)
    body = "".join(_row(one, steps) for one in shown)
    left = f"; {len(peaks) - len(shown)} modules with more headroom are left out" if len(shown) < len(peaks) else ""
    return (
        f'<h2>Largest magnitude by module and step</h2><p class="note">The redder, the fewer octaves to the limit of '
        f'the type; black is not finite{left}.</p><div style="overflow-x:auto"><table style="{_STYLE}">'
        f"<tr><th>module</th><th>type</th>{head}</tr>{body}</table></div>"
    )


def _rows(peaks: Sequence[ModulePeaks]) -> list[ModulePeaks]:
    nearest = sorted(peaks, key=lambda one: one.octaves)[:_MOST_ROWS]
    kept = {id(one) for one in nearest}
    return [one for one in peaks if id(one) in kept]


def _columns(peaks: Sequence[ModulePeaks]) -> list[int]:
    """The steps, thinned to what fits, the last one kept."""
    steps = sorted({step for one in peaks for step, _ in one.peaks})
    stride = max(1, -(-len(steps) // _MOST_COLUMNS))
    return sorted({*steps[::stride], *steps[-1:]})


def _row(one: ModulePeaks, steps: Sequence[int]) -> str:
    values = dict(one.peaks)
    cells = "".join(_cell(values.get(step), one.dtype) for step in steps)
    name = escape(one.module or "(the model)")
    return f'<tr><th style="text-align:left">{name}</th><td>{escape(one.dtype)}</td>{cells}</tr>'


def _cell(value: float | None, dtype: str) -> str:
    if value is None:
        return "<td></td>"
    if not math.isfinite(value):
        return f'<td style="background:#000;color:#fff" title="{value}">{value}</td>'
    octaves = math.log2(LIMITS[dtype] / value) if value > 0 else math.inf
    share = min(1.0, max(0.0, 1.0 - octaves / _OCTAVES))
    return f'<td style="background:rgba(220,38,38,{share:.2f})" title="{octaves:.1f} octaves left">{value:.1e}</td>'
