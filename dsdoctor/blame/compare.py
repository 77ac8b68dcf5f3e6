"""The losses of two runs side by side: how far apart they are, and from which step on."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dsdoctor.runs.facts import Run


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """`steps` that both runs have on all ranks, and the largest relative difference of their losses.

    Skipped steps change no weights, so runs are compared by applied steps only where both skipped the same ones.
    """

    steps: int
    largest_difference: float
    at_step: int | None


def compare(one: Run, other: Run) -> Comparison:
    """Compare step by step, rank by rank; a non-finite loss ends the comparison at its step."""
    largest, at, seen = 0.0, None, 0
    for a, b in zip(one.ranks, other.ranks, strict=False):
        for x, y in zip(a.steps, b.steps, strict=False):
            difference = _difference(x.losses, y.losses)
            if difference is None or x.skipped != y.skipped:
                break
            seen = max(seen, x.index + 1)
            if difference > largest:
                largest, at = difference, x.index
    return Comparison(steps=seen, largest_difference=largest, at_step=at)


def _difference(xs: tuple[float, ...], ys: tuple[float, ...]) -> float | None:
    """Relative difference of two steps' losses, None where they cannot be compared."""
    if not xs or len(xs) != len(ys) or not all(map(math.isfinite, (*xs, *ys))):
        return None
    scale = max(*(abs(v) for v in (*xs, *ys)), 1e-12)
    return max(abs(x - y) for x, y in zip(xs, ys, strict=True)) / scale
