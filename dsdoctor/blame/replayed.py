"""Who is to blame by the flagged micro-batch alone: it was run again with the same weights, as it was and in fp32.

This decides where no run without DeepSpeed and no control in fp32 was made, as in `dsdoctor nan`. It is a narrower
proof than those: of one batch on one rank, so its confidence is lower.
"""

from __future__ import annotations

from dsdoctor.finding import Blame, FirstBad
from dsdoctor.numerics.examined import Examined
from dsdoctor.numerics.repeats import Repeats

_RANGE = ("overflow", "cast-overflow", "inf-minus-inf", "lost-eps", "masked-row", "domain", "unknown")
_SCRIPT = ("domain", "masked-row", "backward-singularity", "uninitialised")
_ON_ITS_OPERANDS = ("domain", "masked-row", "uninitialised")
_RANGE_OF_FP32 = {"float32": 0.8, "bfloat16": 0.7}
"""Types in which a value is not 0 only because it is small, with how sure the operation alone makes."""
_NARROW = ("float16", "bfloat16")
_RACE = (
    ": a race or the hardware, which runs with overlap_comm off, with CUDA_LAUNCH_BLOCKING=1, or on other devices would"
    " tell apart"
)
Proof = tuple[Blame, str, float]
"""Who, why in words, and the confidence."""


def proof(bad: FirstBad | None, examined: Examined | None) -> Proof | None:
    """What the second run of the batch proves, None where it proves nothing."""
    if bad is None:
        return None
    if examined is not None and examined.repeats is not None:
        return _vanished(examined.repeats)
    if bad.cause == "not-reproducible":
        return "inconclusive", f"{bad.detail or 'the value did not come back'}{_RACE}", 0.5
    if bad.phase == "input" and bad.cause == "bad-input":
        return "script", f"the batch itself is not finite ({bad.tensor} holds {bad.kind})", 0.85
    if bad.cause == "ignored-labels":
        return "script", "no label of the batch counts, so its loss is a mean over nothing", 0.85
    if examined is None or examined.again == "not-tried":
        return _of_the_operation(bad)
    if examined.again != "not-finite":
        return None
    if examined.in_fp32 == "finite" and bad.dtype in _NARROW and bad.cause in _RANGE:
        loss = f" (loss {examined.loss_in_fp32:.4g})" if examined.loss_in_fp32 is not None else ""
        text = f"the same batch with the same weights is not finite in {bad.dtype} and finite in fp32{loss}"
        return "precision", text, 0.85
    if examined.in_fp32 == "not-finite" and bad.cause in _SCRIPT:
        where = f" in {bad.op}" if bad.op else ""
        return "script", f"the same batch with the same weights is not finite in fp32 either ({bad.cause}{where})", 0.8
    return None


def _vanished(repeats: Repeats) -> Proof:
    """The value did not come back, and the batch was run several times more."""
    if repeats.reads_unwritten and not repeats.bad:
        return "script", f"when the batch runs again, {repeats.meaning}", 0.75
    return "inconclusive", f"the value did not come back when the batch ran again; {repeats.meaning}", 0.5


def _of_the_operation(bad: FirstBad) -> Proof | None:
    """Where the batch could not run again (ZeRO-3), its module did: its operands make nothing finite in fp64 either."""
    sure = _RANGE_OF_FP32.get(bad.dtype)
    if sure is None or bad.cause not in _ON_ITS_OPERANDS or bad.op is None:
        return None
    return "script", f"{bad.op} is not finite on the same operands in any precision ({bad.cause}: {bad.detail})", sure
