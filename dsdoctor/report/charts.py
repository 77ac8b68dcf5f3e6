"""Curves as inline SVG: a line, its range, the steps that were skipped, the values that are not finite."""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape

from dsdoctor.report.curves import Curve

WIDTH, HEIGHT = 720, 180
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 12, 12, 24
_MOST_POINTS = 2000
"""Points of a line; more cannot be told apart at this width."""


def chart(curve: Curve) -> str:
    """One curve as an `<svg>` element, named for screen readers by its title and range."""
    least, most = min(curve.finite), max(curve.finite)
    label = f"{curve.title}: {least:.6g} to {most:.6g} over steps {curve.steps[0]:g} to {curve.steps[-1]:g}"
    body = "".join((_frame(curve, least, most), *_skipped(curve), *_lines(curve), *_not_finite(curve)))
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">'
        f"<title>{escape(label)}</title>{body}</svg>"
    )


def _frame(curve: Curve, least: float, most: float) -> str:
    right, bottom = WIDTH - _RIGHT, HEIGHT - _BOTTOM
    texts = (
        (_LEFT - 6, _TOP + 10, "end", f"{most:.4g}"),
        (_LEFT - 6, bottom, "end", f"{least:.4g}"),
        (_LEFT, HEIGHT - 6, "start", f"step {curve.steps[0]:g}"),
        (right, HEIGHT - 6, "end", f"{curve.steps[-1]:g}"),
    )
    axis = f'<path class="axis" d="M{_LEFT} {_TOP}V{bottom}H{right}"/>'
    return axis + "".join(f'<text x="{x}" y="{y}" text-anchor="{a}">{escape(t)}</text>' for x, y, a, t in texts)


def _lines(curve: Curve) -> Iterator[str]:
    """The line, broken where a value is not finite."""
    stride = max(1, -(-len(curve.steps) // _MOST_POINTS))
    kept = list(zip(curve.steps, curve.values, strict=True))[::stride]
    part: list[str] = []
    for step, value in (*kept, (0.0, math.nan)):
        if math.isfinite(value):
            part.append(f"{_x(curve, step):.1f},{_y(curve, value):.1f}")
        elif part:
            yield f'<polyline class="line" points="{" ".join(part)}"/>'
            part = []


def _skipped(curve: Curve) -> Iterator[str]:
    yield from _ticks(curve, curve.skipped, "skipped")


def _not_finite(curve: Curve) -> Iterator[str]:
    bad = tuple(s for s, value in zip(curve.steps, curve.values, strict=True) if not math.isfinite(value))
    yield from _ticks(curve, bad, "bad")


def _ticks(curve: Curve, steps: tuple[float, ...], kind: str) -> Iterator[str]:
    """A tick at each of these steps, as one path; those that fall on the same place are drawn once."""
    places = dict.fromkeys(f"{_x(curve, step):.1f}" for step in steps)
    if places:
        path = "".join(f"M{x} {_TOP}V{HEIGHT - _BOTTOM}" for x in places)
        yield f'<path class="{kind}" d="{path}"/>'


def _x(curve: Curve, step: float) -> float:
    first, last = curve.steps[0], curve.steps[-1]
    share = (step - first) / (last - first) if last > first else 0.5
    return _LEFT + min(1.0, max(0.0, share)) * (WIDTH - _LEFT - _RIGHT)


def _y(curve: Curve, value: float) -> float:
    return HEIGHT - _BOTTOM - curve.height(value) * (HEIGHT - _TOP - _BOTTOM)
