"""Non-finite losses and gradients, their disguises, and the precision of the model against that of the run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from dsdoctor.blame.health import Health, judge
from dsdoctor.case import Case
from dsdoctor.diagnoses import before_run, context, log_numbers, remedies
from dsdoctor.diagnoses.base import Diagnosis
from dsdoctor.diagnoses.explained import holds
from dsdoctor.diagnoses.forms import Form, TextDiagnosis
from dsdoctor.finding import Evidence, Finding, FirstBad, Fix, Role
from dsdoctor.logs.facts import LogFacts
from dsdoctor.loss_scale import LossScaleHistory
from dsdoctor.runs.facts import Run

BF16_FAMILIES = re.compile(
    r"(?<![a-z])(?:m|um|flan-|long|by|code)?t5(?![a-z0-9])|bloom|pegasus|gemma|switch[-_]", re.IGNORECASE
)
"""Families whose published weights were trained in bf16 and whose activations leave the range of fp16."""


class NanLoss(Diagnosis):
    """The loss or the gradient norm is not finite.

    What it is: from some step on the loss, or the norm of the gradients, is nan or inf although no search for a loss
    scale explains it. In bf16 and fp32 a single such step counts, even where DeepSpeed survives it by skipping.

    What proves it: the values themselves, in the steps of the run or in the lines of the log.

    When it could be wrong: overflows that belong to an fp16 scale search, with a finite loss, are left out. A script
    that logs nan for a metric it calls loss but does not train on would be misread.

    What to do: find the *first* non-finite value, which is mostly an inf some modules before the first nan:
    `dsdoctor nan`.
    """

    id = "numerics/nan-loss"
    severity = "error"
    title = "the loss or the gradient norm is not finite"

    def examine(self, case: Case) -> Iterator[Finding]:
        run = context.own_run(case)
        health = judge(run) if run is not None else Health()
        if run is not None and health.trouble == "non-finite":
            proof = (Evidence(source=run.leg, rank=health.rank, step=health.step, text=health.why),)
            yield self._found(case, f"{health.why}", proof, 0.85)
            return
        if case.logs is not None:
            yield from self._in_logs(case, case.logs)

    def _in_logs(self, case: Case, logs: LogFacts) -> Iterator[Finding]:
        bad = log_numbers.first_bad_point(case, logs)
        if bad is None:
            yield from self._skipped(case)
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
                text = f"the gradients of {len(history.attempts)} steps are not finite, and no loss scale is at work"
                yield self._found(case, text, _skips_without_scale(case)[:2], 0.8)

    def _found(self, case: Case, cause: str, proof: tuple[Evidence, ...], confidence: float) -> Finding:
        role: Role = "consequence" if _bad_input(case) is not None else "root"
        proof = (*proof, *remedies.first_bad_evidence(case))
        return self.finding(cause=cause, evidence=proof, confidence=confidence, role=role, fixes=remedies.fixes(case))


class LossZeroIsNan(Diagnosis):
    """The Hugging Face Trainer prints loss 0.0 for steps whose loss was nan.

    What it is: `logging_nan_inf_filter` (on by default) replaces a non-finite loss in what is logged, so a loss of
    exactly 0.0 may be the trace of nan. It is easily read as convergence.

    What proves it: the loss is exactly 0.0 from one step on, and the gradient norm is nan, exactly 0 or frozen there.

    When it could be wrong: a task that is really learned by heart has a small loss, hardly exactly 0.0; labels that
    are all masked give 0 too in some models, or nan. In reinforcement learning equal rewards give a loss and a norm of
    exactly 0; lines that show rewards are left out.

    What to do: `logging_nan_inf_filter=False`, then find the first non-finite module.
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
        odd = log_numbers.odd_norms(logs.series_of("grad_norm"), zeros[0])
        if odd is None or (odd == "0" and _rewarded(zeros[0].evidence)):
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


class Bf16ModelInFp16(Diagnosis):
    """A model that was trained in bf16 is run in fp16.

    What it is: weights of T5, mT5, Gemma, BLOOM, Pegasus and other models trained in bf16 give activations beyond
    65504, the largest value of fp16. They overflow in the forward pass, so that no loss scale helps.

    What proves it: the loss scale collapses or the loss is not finite, the precision is fp16, and the model is of such
    a family or its checkpoint says `torch_dtype: bfloat16`. Before a run, the config and the model's config.json alone
    make it a warning.

    When it could be wrong: the same model can also fail for another reason; the run in fp32 tells.

    What to do: bf16 on GPUs that have it (compute capability 8.0 and later), else fp32 or fp32 for the module that
    overflows.
    """

    id = "numerics/bf16-model-in-fp16"
    severity = "error"
    title = "a model trained in bf16 is run in fp16"

    def examine(self, case: Case) -> Iterator[Finding]:
        named = _bf16_model(case)
        trouble = _numeric_trouble(case)
        yield from before_run.trained_in_bf16(self, case)
        if named is None or trouble is None or not _runs_in_fp16(case):
            return
        no_bf16 = context.bf16_supported(case) is False
        patch = {"fp16": {"enabled": False}, "bf16": {"enabled": not no_bf16}}
        text = "train in fp32 (these GPUs have no bf16)" if no_bf16 else "train in bf16, as the model was"
        yield self.finding(
            cause=f"{named.text}, and fp16 cannot hold its activations",
            evidence=(*trouble, named),
            confidence=0.92,
            fixes=(Fix(text=text, patch=patch), *remedies.fixes(case)),
            keys=("fp16.enabled",),
        )


class BadInput(Diagnosis):
    """A batch is not finite (or out of range) before the model has seen it.

    What it is: the data, a collate function or a normalisation puts nan or inf into the inputs of the model.

    What proves it: the detector met the first non-finite value in the inputs of the whole model.

    When it could be wrong: a script that writes -inf into an additive mask on purpose is not meant, and not reported.

    What to do: look at that batch; skip or mend the sample; check divisions by a standard deviation of zero.
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
            evidence=(Evidence(source="numerics", rank=bad.rank, step=bad.step, text=text),),
            confidence=0.95,
            fixes=(
                Fix(text=f"look at the batch of rank {bad.rank}, step {bad.step}, micro-step {bad.micro_step}"),
                Fix(text="guard the data: torch.isfinite(batch).all(), divisions by zero, missing values"),
            ),
        )


class ZeroGradients(TextDiagnosis):
    """The bf16 optimizer asserts that the gradient norm is above zero, and it is not.

    What it is: `assert all_groups_norm > 0.` in DeepSpeed's BF16_Optimizer. It has no message. It fails for two
    opposite reasons: the norm is nan or inf (then it is kept as -1), or it is exactly zero.

    What proves it: the line of the assertion.

    When it could be wrong: the line alone does not say which of the two it is.

    What to do: look for a batch whose labels are all masked (norm zero); else find the first non-finite module.
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


class DtypeUnsupported(TextDiagnosis):
    """The precision is not available on this device.

    What it is: bf16 asked of a GPU before Ampere, fp16 of a CPU, or a kernel that has no such dtype.

    What proves it: the message of DeepSpeed, Transformers or torch.

    When it could be wrong: a process that sees no GPU at all and runs on the CPU by mistake gives the same message; see
    whether the GPUs are visible.

    What to do: the other 16-bit precision, or fp32.
    """

    id = "numerics/dtype-unsupported"
    severity = "error"
    title = "the device does not support this precision"
    forms = (
        Form(message=r"Type (?P<type>fp16|bf16) is not supported on your device"),
        Form(message=r"Your setup doesn't support (?P<type>bf16)"),
        Form(message=r"(?P<type>[Bb][Ff](?:loat)?16) is (?:only|not) supported (?:on|by|for) (?:this|your|GPU|the)"),
        Form(message=r"(?P<type>bf16|fp16) mixed precision requires .*(?:GPU|device|PyTorch)"),
        Form(message=r"\"\w+\" not implemented for '(?P<type>Half|BFloat16)'"),
        Form(message=r"\b(?P<type>fp16|FP16)\b.{0,60}can only be (?:used|enabled) on (?:CUDA|GPU)"),
    )
    cause = "the device does not support {type}"
    caveat = "If there should be a GPU, first see why the process does not see it."
    keys = ("fp16.enabled", "bf16.enabled")

    def remedies(self, groups: Mapping[str, str]) -> tuple[Fix, ...]:
        to_fp16 = "b" in groups.get("type", "").lower()
        patch = {"fp16": {"enabled": to_fp16}, "bf16": {"enabled": not to_fp16}}
        return (Fix(text=f"use {'fp16' if to_fp16 else 'bf16'} (or fp32) on this device", patch=patch),)


class Underflow(Diagnosis):
    """The gradients are flushed to zero in fp16.

    What it is: a gradient below about 2^-24 / loss scale is zero in fp16. With a small scale the model then does not
    learn although nothing fails.

    What proves it: the gradient norm is exactly zero over several applied steps of an fp16 run with a finite loss that
    is not zero. In a log the learning rate must not stand at 0, which would mean that no step was applied at all.

    When it could be wrong: frozen parameters, a loss that does not depend on the model or fully masked labels give zero
    gradients in any precision; and DeepSpeed up to 0.19.6 shows a norm of 0 where the first steps are skipped.

    What to do: this is the one case for a *larger* scale: raise `initial_scale_power`, lower `loss_scale_window`, or
    use bf16.
    """

    id = "numerics/underflow"
    severity = "warning"
    title = "gradients are exactly zero in fp16"

    def examine(self, case: Case) -> Iterator[Finding]:
        run = context.own_run(case)
        if run is None and case.logs is not None:
            yield from self._in_logs(case, case.logs)
        if run is None or not run.ranks or run.facts is None or run.facts.precision != "fp16":
            return
        applied = [step for step in run.ranks[0].steps if not step.skipped and step.grad_norm is not None]
        if len(applied) < 3 or any(step.grad_norm != 0 for step in applied):
            return
        scale = applied[-1].loss_scale
        proof = Evidence(source=run.leg, rank=run.ranks[0].rank, step=applied[0].index, text="gradient norm 0.0")
        yield self._found(
            f"the gradient norm is exactly 0 in all {len(applied)} applied steps at loss scale {scale}", proof
        )

    def _in_logs(self, case: Case, logs: LogFacts) -> Iterator[Finding]:
        zeros = log_numbers.vanished(logs) if context.precision(case) == "fp16" else ()
        if zeros:
            text = f"the gradient norm is exactly 0 in the last {len(zeros)} lines that show it, with a finite loss"
            yield self._found(text, zeros[0].evidence)

    def _found(self, cause: str, proof: Evidence) -> Finding:
        return self.finding(
            cause=cause,
            evidence=(proof,),
            confidence=0.5,
            caveat="Frozen parameters or fully masked labels give zero gradients in any precision.",
            fixes=(
                Fix(text="start with a larger scale", patch={"fp16": {"loss_scale": 0, "initial_scale_power": 20}}),
            ),
            keys=("fp16.initial_scale_power", "fp16.loss_scale"),
        )


class SilentSkip(Diagnosis):
    """Steps were skipped for non-finite gradients although no loss scale is at work, and hardly a line says so.

    What it is: in bf16 and fp32 DeepSpeed skips a step whose gradients are not finite (by default from 0.19.3 on, and
    with a line about it only in some wrappers). The weights do not move and the run looks healthy.

    What proves it: the engine's counter of skipped steps (`step=…, skipped=…` in a log), in a run that is not fp16.

    When it could be wrong: it is not: in these precisions nothing is ever skipped for the sake of a scale.

    What to do: find the first non-finite module.
    """

    id = "numerics/silent-skip"
    severity = "warning"
    title = "steps were skipped for non-finite gradients without a scale to search"

    def examine(self, case: Case) -> Iterator[Finding]:
        run = context.own_run(case)
        if run is None and case.logs is not None and case.logs.loss_scale is not None:
            yield from self._counted(case, case.logs.loss_scale)
        if run is None or run.facts is None or run.facts.precision == "fp16" or not run.ranks:
            return
        rank = run.ranks[0]
        skipped = [step for step in rank.steps if step.skipped]
        if skipped:
            yield self.finding(
                cause=f"{len(skipped)} of {len(rank.steps)} steps were skipped in {run.facts.precision}: their "
                "gradients were not finite",
                evidence=(Evidence(source=run.leg, rank=rank.rank, step=skipped[0].index, text="step skipped"),),
                confidence=0.95,
                role="consequence",
                fixes=remedies.fixes(case),
            )

    def _counted(self, case: Case, history: LossScaleHistory) -> Iterator[Finding]:
        """A log that shows the skipped steps by a counter alone."""
        grown = [count for count in history.counts if count.skipped > 0]
        if history.precision == "fp16" or not grown:
            return
        yield self.finding(
            cause=f"{grown[-1].skipped} of {grown[-1].step} steps were skipped in {history.precision}: their gradients "
            "were not finite",
            evidence=tuple(c.evidence for c in (grown[0], grown[-1]) if c.evidence is not None),
            confidence=0.85,
            fixes=remedies.fixes(case),
        )


class OverlapCommRace(Diagnosis):
    """A frozen gradient norm with loss 0 or nan on several GPUs with ZeRO-1/2 and `overlap_comm`.

    What it is: users report nan, or a gradient norm of exactly 1, 1.414 (the square root of a small integer) with loss
    0, from the first steps on, that goes away without `overlap_comm`: a race between backward and reduction. The norm
    itself is how these releases show that a parameter group was not finite.

    What proves it: several ranks, stage 1 or 2, `overlap_comm` on, and such a norm within the first steps. That is
    reason for a test, not a verdict.

    When it could be wrong: a fully masked batch, an attention kernel or the model itself looks the same.

    What to do: switch `overlap_comm` off for one run; if that cures it, upgrade DeepSpeed and leave it off until then.
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


def _bad_input(case: Case) -> FirstBad | None:
    """The first non-finite value, if it stood in the input of the model."""
    first = case.first_bad
    return first if first is not None and first.phase == "input" else None


def _bf16_model(case: Case) -> Evidence | None:
    """What says that the model was trained in bf16."""
    run = context.own_run(case)
    if run is not None and run.model is not None:
        return _bf16_model_of_run(run)
    if case.logs is None:
        return None
    for event in case.logs.of_kind("model-name", "model-dtype"):
        if event.kind == "model-dtype" or BF16_FAMILIES.search(event.fields.get("model", "")):
            what = event.fields.get("model", "")
            text = f"the model {what} was trained in bf16" if what else "the checkpoint is in bfloat16"
            return Evidence(source=event.source, line=event.line, rank=event.rank, text=text)
    return None


def _bf16_model_of_run(run: Run) -> Evidence | None:
    model = run.model
    if model is None:
        return None
    if model.trained_in in ("bfloat16", "torch.bfloat16"):
        return Evidence(source=run.leg, text=f"the checkpoint of {model.class_name} is in bfloat16")
    if model.model_type is not None and BF16_FAMILIES.match(model.model_type):
        return Evidence(source=run.leg, text=f"{model.class_name} is a {model.model_type}, a family trained in bf16")
    return None


def _rewarded(line: Evidence) -> bool:
    """True for a line of reinforcement learning, where equal rewards give a loss and a gradient of exactly 0."""
    return "reward" in line.text or "advantage" in line.text


def _skips_without_scale(case: Case) -> tuple[Evidence, ...]:
    """The lines about steps that were skipped in a precision that has no loss scale."""
    unscaled = (history for history in context.histories(case) if history.precision != "fp16")
    return tuple(a.evidence for history in unscaled for a in history.attempts if a.evidence is not None)


def _at_the_floor(history: LossScaleHistory) -> tuple[Evidence, ...]:
    """The first overflow at the smallest scale, or the last line of the counter."""
    floor = history.floor or 1
    lowest = next((one.evidence for one in history.attempts if one.scale <= floor), None)
    last = history.attempts[-1].evidence if history.attempts else history.counts[-1].evidence
    return tuple(proof for proof in (lowest or last,) if proof is not None)


def _runs_in_fp16(case: Case) -> bool:
    known = context.precision(case)
    return known == "fp16" or (known is None and any(h.precision == "fp16" for h in context.histories(case)))


def _numeric_trouble(case: Case) -> tuple[Evidence, ...] | None:
    """The evidence that the numbers of the job went wrong, None if nothing says so."""
    run = context.own_run(case)
    health = judge(run) if run is not None else Health()
    if run is not None and health.numeric:
        return (Evidence(source=run.leg, rank=health.rank, step=health.step, text=health.why),)
    for history in context.histories(case):
        if context.read(case, history).pattern == "collapse":
            return _at_the_floor(history)
    if case.logs is not None and (bad := log_numbers.first_bad_point(case, case.logs)) is not None:
        return (bad[2].evidence,)
    return None


DIAGNOSES: tuple[Diagnosis, ...] = (
    BadInput(),
    Bf16ModelInFp16(),
    NanLoss(),
    LossZeroIsNan(),
    ZeroGradients(),
    DtypeUnsupported(),
    OverlapCommRace(),
    SilentSkip(),
    Underflow(),
)
