"""The losses of two runs side by side: how far apart they are, from which step on, and whether that is rounding."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from dsdoctor.blame.health import Health, judge
from dsdoctor.case import Case
from dsdoctor.runs.facts import Run

_ROUNDING = {"fp32": 1e-4, "bf16": 1e-2, "fp16": 4e-3}
"""Relative difference of two losses in one step that rounding explains, for a config's precision: some units in the
last place of a loss (2**-23, 2**-8, 2**-11) where the sums of a model are taken in another order."""
_GROWTH = 1.0
"""Each step starts from weights that differ already, so what rounding explains grows by this share of it a step."""
_MOST = 0.25
_FLOOR = 0.02
"""Losses below this share of the largest are compared on its scale: near 0 a relative difference means nothing."""
PERSISTS = 3
"""Steps beyond rounding that it takes: a difference that goes away again was a hard batch."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """`steps` that both runs have on all ranks, and the largest relative difference of their losses.

    `apart_from` is the first step from which on they differ by more than rounding explains, None where they never do.
    Skipped steps change no weights, so runs are compared by applied steps only where both skipped the same ones.
    """

    steps: int
    largest_difference: float
    at_step: int | None
    apart_from: int | None = None


def compare(one: Run, other: Run) -> Comparison:
    """Compare step by step, rank by rank; a non-finite loss ends the comparison at its step."""
    differences = [list(_differences(one, other, rank)) for rank in range(min(len(one.ranks), len(other.ranks)))]
    every = [(difference, step) for rank in differences for step, difference in rank]
    largest, at = max(every, key=lambda pair: pair[0], default=(0.0, None))
    precision = one.facts.precision if one.facts is not None else "fp32"
    apart = [step for rank in differences if (step := _apart_from(rank, precision)) is not None]
    return Comparison(
        steps=max((step + 1 for _difference, step in every), default=0),
        largest_difference=largest,
        at_step=at if largest > 0 else None,
        apart_from=min(apart, default=None),
    )


def diverged(case: Case) -> Health | None:
    """The run with DeepSpeed moves away from the run without it, while the latter agrees with itself; else None."""
    given, plain, again = (case.run(leg) for leg in ("with-deepspeed", "without-deepspeed", "repeat"))
    if given is None or plain is None or again is None or nondeterministic(case):
        return None
    if any(judge(run).failed for run in (given, plain, again)):
        return None
    found = compare(given, plain)
    if found.apart_from is None or compare(again, plain).steps <= found.apart_from:
        return None
    most = f"{found.largest_difference:.1%} in step {found.at_step}"
    why = f"the losses move away from those of the run without DeepSpeed from step {found.apart_from} on ({most})"
    return Health(trouble="diverged", why=why, step=found.apart_from)


def nondeterministic(case: Case) -> bool:
    """The run without DeepSpeed, made twice, disagrees with itself: then a difference to it proves little."""
    plain, again = case.run("without-deepspeed"), case.run("repeat")
    if plain is None or again is None or again.outcome == "interrupted":
        return False
    if judge(plain).failed != judge(again).failed:
        return True
    return compare(again, plain).apart_from is not None


def rounding(precision: str, step: int) -> float:
    """Relative difference of two losses that rounding may explain in that step (from 0)."""
    return min(_MOST, _ROUNDING[precision] * (1 + _GROWTH * step))


def _apart_from(differences: list[tuple[int, float]], precision: str) -> int | None:
    """The first of several steps in a row that are further apart than rounding explains."""
    beyond = [step for step, difference in differences if difference > rounding(precision, step)]
    rows = (beyond[at : at + PERSISTS] for at in range(len(beyond)))
    return next((row[0] for row in rows if len(row) == PERSISTS and row[-1] - row[0] == PERSISTS - 1), None)


def _differences(one: Run, other: Run, rank: int) -> Iterator[tuple[int, float]]:
    """Step and relative difference of one rank's losses, as long as they can be compared."""
    mine, theirs = one.ranks[rank].steps, other.ranks[rank].steps
    finite = [abs(loss) for step in theirs for loss in step.losses if math.isfinite(loss)]
    floor = max(_FLOOR * max(finite, default=0.0), 1e-12)
    for a, b in zip(mine, theirs, strict=False):
        difference = _difference(a.losses, b.losses, floor)
        if difference is None or a.skipped != b.skipped:
            return
        yield a.index, difference


def _difference(xs: tuple[float, ...], ys: tuple[float, ...], floor: float) -> float | None:
    """Relative difference of two steps' losses, None where they cannot be compared."""
    if not xs or len(xs) != len(ys) or not all(map(math.isfinite, (*xs, *ys))):
        return None
    scale = max(*(abs(v) for v in (*xs, *ys)), floor)
    return max(abs(x - y) for x, y in zip(xs, ys, strict=True)) / scale
