"""Values that come near the largest number of their type before they pass it, and gradients below the smallest."""

from __future__ import annotations

import math
from collections.abc import Iterator

from dsdoctor.case import Case
from dsdoctor.diagnoses.base import Diagnosis
from dsdoctor.finding import Evidence, Finding, Fix
from dsdoctor.numerics.headroom import LIMITS, nearest
from dsdoctor.numerics.underflow import Underflow

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
        near = nearest(case.headroom)
        if near is None:
            return
        place = near.module or "the model"
        first, last = near.finite[0], near.finite[-1]
        yield self.finding(
            cause=near.forecast,
            evidence=(
                Evidence(source="numerics", step=first[0], text=f"largest magnitude of {place}: {first[1]:.4g}"),
                Evidence(
                    source="numerics",
                    step=last[0],
                    text=f"largest magnitude of {place}: {last[1]:.4g} ({near.dtype} ends at {LIMITS[near.dtype]:.4g})",
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


class GradientUnderflow(Diagnosis):
    """Most gradients are too small for fp16 and are flushed to zero.

    What it is: fp16 ends at 6e-8 below. Gradients smaller than that are 0, and those weights do not learn, without any
    message. It is what the loss scale is for, and the one case that asks for a larger one: a static scale that is too
    small, or a dynamic one that was driven down by a few bad batches and recovers slowly.

    What proves it: one micro-batch, run again in fp32 with the same weights and loss scale: elements that are not 0
    there and are 0 in fp16.

    When it could be wrong: it is one micro-batch of one rank, early in the run. Gradients that small may not matter.

    What to do: a dynamic loss scale (`"loss_scale": 0`) with a larger `initial_scale_power` or a shorter
    `loss_scale_window`; or bf16, which keeps them without a scale.
    """

    id = "numerics/gradient-underflow"
    severity = "warning"
    title = "fp16 flushes most gradients to zero"

    def examine(self, case: Case) -> Iterator[Finding]:
        seen = case.underflow
        if seen is None or seen.share < _FLUSHED:
            return
        worst = ", ".join(f"{name} ({share:.0%})" for name, share in seen.worst[:3])
        text = f"{seen.share:.0%} of the gradients are flushed to zero at loss scale {seen.scale:g}"
        yield self.finding(
            cause=text,
            evidence=(Evidence(source="numerics", step=seen.step, text=f"{text}, most of all {worst}"),),
            confidence=0.7,
            caveat="Measured on one micro-batch of one rank.",
            fixes=(*_larger_scale(seen), _BF16_KEEPS),
        )


_FLUSHED = 0.5
_BF16_KEEPS = Fix(
    text="or train in bf16, which needs no loss scale (not tried)",
    patch={"fp16": {"enabled": False}, "bf16": {"enabled": True}},
)


def _larger_scale(seen: Underflow) -> tuple[Fix, ...]:
    """The smallest loss scale that was tried on the same micro-batch and halves the loss of gradients."""
    if seen.factor is None:
        return (Fix(text="a larger loss scale (those that were tried do not help)"),)
    share = dict(seen.larger)[seen.factor]
    scale = seen.scale * seen.factor
    power = math.ceil(math.log2(scale)) if scale > 0 else 0
    text = f"a loss scale of {scale:g} (tried: finite, {share:.0%} flushed to zero)"
    return (Fix(text=text, patch={"fp16": {"loss_scale": 0, "initial_scale_power": power}}),)


DIAGNOSES: tuple[Diagnosis, ...] = (Headroom(), GradientUnderflow())
