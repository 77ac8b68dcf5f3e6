"""Non-finite losses and gradients, and their disguises."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from dsdoctor.blame.health import Health, judge
from dsdoctor.case import Case
from dsdoctor.diagnoses import context, log_numbers, remedies
from dsdoctor.diagnoses.base import Diagnosis
from dsdoctor.diagnoses.explained import holds
from dsdoctor.diagnoses.forms import Form, TextDiagnosis
from dsdoctor.diagnoses.numerics_precision import Bf16ModelInFp16
from dsdoctor.finding import Evidence, Finding, FirstBad, Fix, Role
from dsdoctor.logs.facts import LogFacts


class NanLoss(Diagnosis):
    """The loss or the gradient norm is not finite.

    What it is: from some step on the loss, or the norm of the gradients, is nan or inf although no search for a loss
    scale explains it. In bf16 and fp32 a single such step counts, even where DeepSpeed survives it by skipping.

    What proves it: the values themselves, in the steps of the run or in the lines of the log; or the words of a script
    that looks at its loss and stops.

    When it could be wrong: overflows that belong to an fp16 scale search, with a finite loss, are left out. A script
    that logs nan for a metric it calls loss but does not train on would be misread.

    What to do: find the *first* non-finite value, which is mostly an inf some modules before the first nan:
    `dsdoctor nan DS_CONFIG TRAIN.py`. Without it: `dsdoctor.attach(engine)` in the script.
    """

    id = "numerics/nan-loss"
    severity = "error"
    title = "the loss or the gradient norm is not finite"

    def examine(self, case: Case) -> Iterator[Finding]:
        run = context.own_run(case)
        health = judge(run) if run is not None else Health()
        if run is not None and health.trouble == "non-finite":
            proof = (Evidence(source=run.leg, rank=health.rank, step=health.step, text=health.why),)
            yield self._found(case, health.why, proof, 0.85 if case.first_bad is None else 0.9)
            return
        bad = case.first_bad
        if run is None and bad is not None and bad.cause != "not-reproducible":
            yield self._found(case, f"the micro-batch of step {bad.step}, rank {bad.rank} is not finite", (), 0.85)
        if case.logs is not None:
            yield from self._in_logs(case, case.logs)

    def _in_logs(self, case: Case, logs: LogFacts) -> Iterator[Finding]:
        bad = log_numbers.first_bad_point(case, logs)
        if bad is None:
            yield from list(self._skipped(case)) or self._stopped(case, logs)
            return
        name, before, point = bad
        if name != "the loss" and holds(case, "numerics/loss-zero-is-nan"):
            return
        came = f" after {before.value:.6g}" if before is not None else " from its first value on"
        where = f" at step {point.step:g}" if point.step is not None else ""
        proof = (point.evidence, *_skips_without_scale(case)[:1])
        yield self._found(case, f"{name} is {point.value}{where}{came}", proof, 0.85)

    def _skipped(self, case: Case) -> Iterator[Finding]:
        """Steps that were skipped although no loss scale is at work: their gradients were not finite."""
        for history in context.histories(case):
            if history.precision != "fp16" and history.attempts:
                steps = len(history.attempts) + history.unlisted
                text = f"the gradients of {steps} steps are not finite, and no loss scale is at work"
                found = self._found(case, text, _skips_without_scale(case)[:2], 0.8)
                known = context.precision(case) is not None
                yield found if known else replace(found, confidence=0.5, caveat=_PERHAPS_STATIC)

    def _stopped(self, case: Case, logs: LogFacts) -> Iterator[Finding]:
        """The script said so and ended itself."""
        for event in logs.of_kind("stops-for-loss"):
            last = logs.last_line
            ends = last is not None and last.source == event.source and (last.line or 0) - event.line <= _LINES_AFTER
            if logs.end == "failed" or ends:
                cause = f"the script stopped because its loss is {event.fields['value']}"
                yield self._found(case, cause, (event.evidence(),), 0.8)
                return

    def _found(self, case: Case, cause: str, proof: tuple[Evidence, ...], confidence: float) -> Finding:
        role: Role = "consequence" if _explained(case) else "root"
        proof = (*proof, *remedies.first_bad_evidence(case))
        return self.finding(cause=cause, evidence=proof, confidence=confidence, role=role, fixes=remedies.fixes(case))


_LINES_AFTER = 5
"""Lines that a script prints after it has said why it stops."""
_PERHAPS_STATIC = (
    "The precision is not in this record: under fp16 with a static loss scale the same line stands for an overflow."
)


class LossZeroIsNan(Diagnosis):
    """The Hugging Face Trainer prints loss 0.0 for steps whose loss was nan.

    What it is: `logging_nan_inf_filter` (on by default) replaces a non-finite loss in what is logged, so a loss of
    exactly 0.0 may be the trace of nan. It is easily read as convergence.

    What proves it: the loss is exactly 0.0 from one step on, and the gradient norm is nan, exactly 0 or frozen there.

    When it could be wrong: a task that is really learned by heart ends at exactly 0 as well, in 16 bits or after
    rounding; where the losses before were next to nothing already, or the norm is small and not 0, nothing is said.
    Labels that are all masked give 0 too in some models, or nan. In reinforcement learning equal rewards give a loss
    and a norm of exactly 0; lines that show rewards are left out.

    What to do: `TrainingArguments(logging_nan_inf_filter=False)` shows the real loss; then
    `dsdoctor nan DS_CONFIG TRAIN.py` finds the first non-finite module.
    """

    id = "numerics/loss-zero-is-nan"
    severity = "error"
    title = "loss 0.0 hides a loss that is nan"

    def examine(self, case: Case) -> Iterator[Finding]:
        logs = case.logs
        loss = logs.series_of("loss") if logs is not None else None
        zeros = log_numbers.zeros_at_the_end(loss) if loss is not None else ()
        if logs is None or len(zeros) < log_numbers.ZEROS_THAT_COUNT:
            return
        norms = logs.series_of("grad_norm")
        odd = log_numbers.odd_norms(norms, zeros[0])
        if loss is None or norms is None or odd is None or (odd == "0" and _rewarded(zeros[0].evidence)):
            return
        if log_numbers.small_norms(norms, zeros[0]) and (odd != "0" or log_numbers.came_down(loss, zeros[0])):
            return
        where = f" from step {zeros[0].step:g} on" if zeros[0].step is not None else ""
        yield self.finding(
            cause=f"the loss is exactly 0.0{where} and the gradient norm is {odd}: the Trainer's filter hides nan",
            evidence=tuple(point.evidence for point in zeros[:2]),
            confidence=0.9,
            fixes=(
                Fix(text="set logging_nan_inf_filter=False in TrainingArguments to see the real loss"),
                *remedies.fixes(case),
            ),
        )


class BadInput(Diagnosis):
    """A batch is not finite (or out of range) before the model has seen it.

    What it is: the data, a collate function or a normalisation puts nan or inf into the inputs of the model.

    What proves it: the detector met the first non-finite value in the inputs of the whole model.

    When it could be wrong: a script that writes -inf into an additive mask on purpose is not meant, and not reported.

    What to do: look at that batch (`torch.isfinite(x).all()` in the collate function); skip or mend the sample; check
    divisions by a standard deviation of zero.
    """

    id = "numerics/bad-input"
    severity = "error"
    title = "the input of the model is not finite"

    def examine(self, case: Case) -> Iterator[Finding]:
        bad = _bad_input(case)
        if bad is None:
            return
        text = f"{bad.tensor} of step {bad.step} on rank {bad.rank} holds {bad.kind} before the model sees it"
        yield self.finding(
            cause=f"the input {text}",
            evidence=(
                Evidence(source="numerics", rank=bad.rank, step=bad.step, text=text),
                *remedies.first_bad_evidence(case)[1:],
            ),
            confidence=0.95,
            fixes=(
                *remedies.tried(case),
                Fix(text=f"look at the batch of rank {bad.rank}, step {bad.step}, micro-step {bad.micro_step}"),
                Fix(text="guard the data: torch.isfinite(batch).all(), divisions by zero, missing values"),
            ),
        )


class ReductionOverflow(Diagnosis):
    """The gradients of every rank are finite, and their sum over the ranks is not.

    What it is: gradients are reduced in the precision of the model unless the config says otherwise. In fp16 the sum
    over many ranks passes 65504 although no rank's own gradient does. Without ZeRO the ranks are summed first and
    divided afterwards, so that N ranks reach that limit with gradients N times smaller.

    What proves it: the detector looked at every gradient before the reduction and after it: finite before on all
    ranks, inf after.

    When it could be wrong: a gradient that is changed between the two by a hook of the script; a broken link between
    the ranks (`dsdoctor comm` checks the values that arrive).

    What to do: `"communication_data_type": "fp32"`; without ZeRO also `prescale_gradients`. It costs twice the traffic
    of gradients, and bf16 does away with the problem.
    """

    id = "numerics/reduction-overflow"
    severity = "error"
    title = "the gradients overflow when they are summed over the ranks"

    def examine(self, case: Case) -> Iterator[Finding]:
        bad = case.first_bad
        if bad is None or bad.cause != "reduction-overflow":
            return
        unscaled = context.stage(case) == 0
        prescale = Fix(text="or divide before the sum (without ZeRO only)", patch={"prescale_gradients": True})
        yield self.finding(
            cause=f"every rank has finite gradients in step {bad.step}, and their sum over the ranks is {bad.kind}"
            + (": without ZeRO they are summed first and divided afterwards" if unscaled else ""),
            evidence=remedies.first_bad_evidence(case),
            confidence=0.9,
            fixes=(
                Fix(text="reduce the gradients in fp32", patch={"communication_data_type": "fp32"}),
                *((prescale,) if unscaled else ()),
            ),
            keys=("communication_data_type",),
        )


class ZeroGradients(TextDiagnosis):
    """The bf16 optimizer asserts that the gradient norm is above zero, and it is not.

    What it is: `assert all_groups_norm > 0.` in DeepSpeed's BF16_Optimizer. It has no message. It fails for two
    opposite reasons: the norm is nan or inf (then it is kept as -1), or it is exactly zero.

    What proves it: the line of the assertion.

    When it could be wrong: the line alone does not say which of the two it is.

    What to do: look for a batch whose labels are all masked (`(labels != -100).sum() == 0`, norm zero); else
    `dsdoctor nan DS_CONFIG TRAIN.py` finds the first non-finite module.
    """

    id = "numerics/zero-gradients"
    severity = "error"
    title = "the norm of all gradients is zero or not finite"
    forms = (
        Form(types=("AssertionError",), frames=r"all_groups_norm\s*>\s*0"),
        Form(types=("AssertionError",), message=r"all_groups_norm\s*>\s*0"),
    )
    cause = "DeepSpeed's bf16 optimizer found the norm of all gradients zero or not finite (all_groups_norm > 0 failed)"
    caveat = "The assertion is the same for gradients that are nan and for gradients that are exactly zero."
    fixes = (
        Fix(text="look for a batch whose labels or attention mask are all masked (gradients exactly zero)"),
        remedies.LOCATE,
    )


class OverlapCommRace(Diagnosis):
    """A frozen gradient norm with loss 0 or nan on several GPUs with ZeRO-1/2 and `overlap_comm`.

    What it is: users report nan, or a gradient norm of exactly 1, 1.414 (the square root of a small integer) with loss
    0, from the first steps on, that goes away without `overlap_comm`: a race between backward and reduction. The norm
    itself is how these releases show that a parameter group was not finite.

    What proves it: several ranks, stage 1 or 2, `overlap_comm` on, and such a norm within the first steps. That is
    reason for a test, not a verdict.

    When it could be wrong: a fully masked batch, an attention kernel or the model itself looks the same.

    What to do: `"zero_optimization": {"overlap_comm": false}` for one run, nothing else changed; if that cures it,
    upgrade DeepSpeed and leave it off until then.
    """

    id = "numerics/overlap-comm-race"
    severity = "warning"
    title = "possibly a race of overlap_comm"

    def examine(self, case: Case) -> Iterator[Finding]:
        logs = case.logs
        if logs is None or context.stage(case) not in (1, 2):
            return
        if context.config_value(case, "zero_optimization.overlap_comm") is not True or log_numbers.world_size(logs) < 2:
            return
        norms, loss = logs.series_of("grad_norm"), logs.series_of("loss")
        zeros = log_numbers.zeros_at_the_end(loss) if loss is not None else ()
        sentinel = log_numbers.sentinel(norms, zeros[0]) if norms is not None and zeros else None
        if sentinel is None:
            return
        yield self.finding(
            cause=f"loss 0 and a gradient norm frozen at {sentinel:.4g} on several GPUs with overlap_comm",
            evidence=(zeros[0].evidence,),
            confidence=0.5,
            caveat="A test, not a verdict: masked batches, attention kernels and the model itself look the same.",
            fixes=(
                Fix(text="test: switch only overlap_comm off", patch={"zero_optimization": {"overlap_comm": False}}),
                remedies.LOCATE,
            ),
            keys=("zero_optimization.overlap_comm",),
        )


def _explained(case: Case) -> bool:
    """True if a narrower diagnosis says where the value that is not finite comes from."""
    first = case.first_bad
    located = first is not None and (first.phase == "input" or first.cause == "reduction-overflow")
    return (
        located
        or any(found.severity == "error" for found in Bf16ModelInFp16().examine(case))
        or (_autocast_in_fp16(case) and holds(case, "version/known-defect"))
    )


def _autocast_in_fp16(case: Case) -> bool:
    """True under torch_autocast in fp16, whose own scaler skips steps in releases that tell nothing of its scale."""
    on = context.config_value(case, "torch_autocast.enabled") is True
    return on and context.config_value(case, "torch_autocast.dtype") in ("fp16", "float16", "half", "torch.float16")


def _bad_input(case: Case) -> FirstBad | None:
    """The first non-finite value, if it stood in the input of the model."""
    first = case.first_bad
    return first if first is not None and first.phase == "input" else None


def _rewarded(line: Evidence) -> bool:
    """True for a line of reinforcement learning, where equal rewards give a loss and a gradient of exactly 0."""
    return "reward" in line.text or "advantage" in line.text


def _skips_without_scale(case: Case) -> tuple[Evidence, ...]:
    """The lines about steps that were skipped in a precision that has no loss scale."""
    unscaled = (history for history in context.histories(case) if history.precision != "fp16")
    return tuple(a.evidence for history in unscaled for a in history.attempts if a.evidence is not None)


DIAGNOSES: tuple[Diagnosis, ...] = (
    BadInput(),
    ReductionOverflow(),
    NanLoss(),
    LossZeroIsNan(),
    ZeroGradients(),
    OverlapCommRace(),
)
