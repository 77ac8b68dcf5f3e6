"""Values that come near the largest number of their type, before they pass it."""

from __future__ import annotations

from collections.abc import Iterator

from dsdoctor.case import Case
from dsdoctor.diagnoses.base import Diagnosis
from dsdoctor.finding import Evidence, Finding, Fix
from dsdoctor.numerics.headroom import LIMITS, ModulePeaks

_SOON = 500.0
"""Steps within which a crossing is worth a warning."""
_CLOSE = 6.0
"""Octaves of headroom above which nothing is forecast, however steep the line."""
_CAVEAT = "A straight line through the octaves of these steps: warm-up, decay and other data bend it."


class Headroom(Diagnosis):
    """The values of a module grow towards the largest number of their type.

    What it is: in fp16 a value beyond 65504 is inf. Activations that grow by a steady factor a step (a residual stream
    that drifts, a learning rate that is too high) get there at a step that can be told beforehand. Headroom is counted
    in octaves: how often the largest magnitude can still double.

    What proves it: the largest magnitude of each module in each step of `dsdoctor nan`, and a straight line through its
    logarithm that explains most of what it does.

    When it could be wrong: a few steps say little about thousands. Growth in warm-up often levels off.

    What to do: bf16, whose range is that of fp32; keep that module in fp32; a lower learning rate, or a norm in front.
    """

    id = "numerics/headroom"
    severity = "warning"
    title = "values come near the largest number of their type"

    def examine(self, case: Case) -> Iterator[Finding]:
        if case.first_bad is not None:
            return
        near = [one for one in case.headroom if _crosses_soon(one)]
        nearest = min(near, key=lambda one: one.steps_left or 0.0, default=None)
        if nearest is None or nearest.steps_left is None:
            return
        place = nearest.module or "the model"
        first, last = nearest.finite[0], nearest.finite[-1]
        yield self.finding(
            cause=f"{place} crosses the limit of {nearest.dtype} in about {nearest.steps_left:.0f} steps if it goes on "
            f"like this: {nearest.octaves:.1f} octaves of headroom are left",
            evidence=(
                Evidence(source="numerics", step=first[0], text=f"largest magnitude of {place}: {first[1]:.4g}"),
                Evidence(
                    source="numerics",
                    step=last[0],
                    text=f"largest magnitude of {place}: {last[1]:.4g} ({nearest.dtype} ends at "
                    f"{LIMITS[nearest.dtype]:.4g})",
                ),
            ),
            confidence=0.5,
            caveat=_CAVEAT,
            fixes=(
                Fix(
                    text="train in bf16, whose range is that of fp32 (not tried: nothing is wrong yet)",
                    patch={"fp16": {"enabled": False}, "bf16": {"enabled": True}},
                ),
                Fix(
                    text=f"or keep {place} in fp32, lower the learning rate, or clip (not tried: nothing is wrong yet)"
                ),
            ),
        )


def _crosses_soon(peaks: ModulePeaks) -> bool:
    """Only fp16 ends within reach of ordinary activations."""
    left = peaks.steps_left
    return peaks.dtype == "float16" and left is not None and left <= _SOON and peaks.octaves <= _CLOSE


DIAGNOSES: tuple[Diagnosis, ...] = (Headroom(),)
