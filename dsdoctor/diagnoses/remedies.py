"""What to do about a non-finite value, by what the detector knows of it; where it did not run, how to run it."""

from __future__ import annotations

from dataclasses import replace

from dsdoctor.case import Case
from dsdoctor.diagnoses import context
from dsdoctor.finding import Evidence, FirstBad, Fix
from dsdoctor.numerics.examined import Examined

LOCATE = Fix(text="find the first non-finite module, its phase and cause: dsdoctor nan DS_CONFIG TRAIN.py")
_FP32 = Fix(
    text="train in fp32, or keep the overflowing module in fp32 (dsdoctor nan names it)",
    patch={"fp16": {"enabled": False}},
)
_BF16 = Fix(
    text="train in bf16, which has the range of fp32 (GPUs of compute capability 8.0 and later)",
    patch={"fp16": {"enabled": False}, "bf16": {"enabled": True}},
)
_RANGE = ("overflow", "cast-overflow")
_OUTCOMES = {"finite": "finite", "not-finite": "not finite"}
_BY_CAUSE = {
    "domain": "guard the operand of {op} in {module}: clamp it, or add an eps inside the log, root or division",
    "backward-singularity": "keep {module} away from the point where its gradient has no limit: an eps inside the root "
    "or norm, or where() on its input as well as on its output",
    "masked-row": "a row of {module} is masked as a whole: drop such rows, or mask with a finite minimum",
    "ignored-labels": "no label of the batch counts: drop such samples, or return a loss of zero for them",
    "inf-minus-inf": "{module} subtracts infinities: look for what made them that large before it",
    "lost-eps": "the eps in {module} is zero in this precision: a larger one",
    "corrupted-weights": "the weights of {module} are not finite before they are used: look at the checkpoint and its "
    "missing keys",
    "exploded-weights": "the weights of {module} have grown out of all proportion: a lower learning rate, warm-up, "
    "clipping",
    "optimizer-born": "the optimizer step made the weights of {module} non-finite: check gradients before the step, "
    "clip them",
    "uninitialised": "{module} uses memory that nothing was written to",
    "bad-input": "the batch itself is not finite: look at the sample",
}


def first_bad_evidence(case: Case) -> tuple[Evidence, ...]:
    """What the detector named, as a piece of evidence."""
    bad = case.first_bad
    if bad is None:
        return ()
    op = f", in {bad.op}" if bad.op else ""
    text = f"the first {bad.kind} is in the {bad.phase} of {_module(bad)}: {bad.tensor}{op} (cause: {bad.cause})"
    told = [text, *_details(bad), *_run_again(case.examined)]
    return tuple(Evidence(source="numerics", rank=bad.rank, step=bad.step, text=each) for each in told)


def _details(bad: FirstBad) -> list[str]:
    """What the cause rests on, and the user's own line."""
    return [text for text in (bad.detail, f"at {bad.line}" if bad.line else "") if text]


def _run_again(examined: Examined | None) -> list[str]:
    """What the same micro-batch did when it was run again, as it was, in fp32, and with remedies that failed."""
    if examined is None:
        return []
    told = []
    if examined.again != "not-tried":
        loss = f", loss {examined.loss_in_fp32:.4g}" if examined.loss_in_fp32 is not None else ""
        fp32 = f"; in fp32: {_OUTCOMES[examined.in_fp32]}{loss}" if examined.in_fp32 in _OUTCOMES else ""
        told.append(f"the same micro-batch run again: {_OUTCOMES.get(examined.again, examined.again)}{fp32}")
    if examined.samples:
        told.append(f"of the micro-batch only sample {', '.join(map(str, examined.samples[:8]))} does it")
    if examined.repeats is not None:
        told.append(examined.repeats.meaning)
    vain = [trial for trial in examined.trials if trial.outcome in ("not-finite", "failed")]
    return told + [f"{trial.text}: {trial.told()}" for trial in vain if trial.remedy != "skip-sample"]


def fixes(case: Case) -> tuple[Fix, ...]:
    """The fixes for the first non-finite value of the case: those that were tried, else advice that says it was not."""
    bad = case.first_bad
    if bad is None:
        return (LOCATE,)
    return tried(case) or tuple(replace(fix, text=f"{fix.text} ({_not_tried(case)})") for fix in _advice(case, bad))


def tried(case: Case) -> tuple[Fix, ...]:
    """The remedies that made the flagged micro-batch finite, and those that could not be tried on it."""
    if case.examined is None:
        return ()
    fit = [t for t in case.examined.trials if t.remedy != "bf16" or context.bf16_supported(case) is not False]
    order = [t for t in fit if t.outcome == "finite"] + [t for t in fit if t.outcome == "not-tried"]
    return tuple(Fix(text=f"{trial.text} ({trial.told()})", patch=trial.config) for trial in order)


def _not_tried(case: Case) -> str:
    why = case.examined.why_not if case.examined is not None else ""
    return f"not tried: {why}" if why else "not tried"


def _advice(case: Case, bad: FirstBad) -> tuple[Fix, ...]:
    if bad.cause in _RANGE and context.precision(case) == "fp16":
        return _wider_range(case, bad)
    text = _BY_CAUSE.get(bad.cause)
    if text is None:
        return (Fix(text=f"look at the {bad.phase} of {_module(bad)}, where the first {bad.kind} stands"),)
    return (Fix(text=text.format(op=bad.op or "the operation", module=_module(bad))),)


def wider_precision(case: Case) -> Fix:
    """Another precision than fp16 for the whole job: bf16, or fp32 where the devices are known to lack it."""
    return _FP32 if context.bf16_supported(case) is False else _BF16


def _wider_range(case: Case, bad: FirstBad) -> tuple[Fix, ...]:
    """A value beyond fp16: bf16 where the device has it, else fp32, or fp32 for that module alone."""
    if context.bf16_supported(case) is False:
        patch = {"fp16": {"enabled": False}}
        whole = Fix(text="train in fp32 (this device has no bf16)", patch=patch)
    else:
        patch = {"fp16": {"enabled": False}, "bf16": {"enabled": True}}
        whole = Fix(text="train in bf16, whose range is that of fp32", patch=patch)
    if not bad.module:
        return (whole,)
    return (whole, Fix(text=f"or keep {bad.module} in fp32: the patch of its forward is in the report"))


def _module(bad: FirstBad) -> str:
    return bad.module or "the model itself"
