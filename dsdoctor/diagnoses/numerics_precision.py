"""The precision of a job against that of its model, and against what its device can do."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from dsdoctor.blame.health import Health, judge
from dsdoctor.case import Case
from dsdoctor.diagnoses import before_run_model, context, log_numbers, remedies
from dsdoctor.diagnoses.base import Diagnosis
from dsdoctor.diagnoses.forms import Form, TextDiagnosis
from dsdoctor.finding import Evidence, Finding, Fix
from dsdoctor.loss_scale import LossScaleHistory
from dsdoctor.runs.facts import Run

BF16_FAMILIES = re.compile(
    r"(?<![a-z])(?:m|um|flan-|long|by|code)?t5(?![a-z0-9])|bloom|pegasus|gemma|switch[-_]", re.IGNORECASE
)
"""Families whose published weights were trained in bf16 and whose activations leave the range of fp16."""


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
        yield from before_run_model.trained_in_bf16(self, case, BF16_FAMILIES)
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


class DtypeUnsupported(TextDiagnosis):
    """The precision is not available on this device.

    What it is: bf16 asked of a GPU before Ampere, fp16 of a CPU, or a kernel that has no such dtype.

    What proves it: the message of DeepSpeed, Transformers or torch.

    When it could be wrong: a process that sees no GPU at all and runs on the CPU by mistake gives the same message; see
    whether the GPUs are visible.

    What to do: the other 16-bit precision (`"fp16": {"enabled": true}` before Ampere), or fp32. `python -c "import
    torch; print(torch.cuda.get_device_capability())"`: bf16 needs (8, 0).
    """

    id = "numerics/dtype-unsupported"
    severity = "error"
    title = "the device does not support this precision"
    forms = (
        Form(message=r"Type (?P<type>fp16|bf16) is not supported(?: on your device|\.)"),
        Form(message=r"Your setup doesn't support (?P<type>bf16)"),
        Form(message=r"(?P<type>[Bb][Ff](?:loat)?16) is (?:only|not) supported (?:on|by|for) (?:this|your|GPU|the)"),
        Form(message=r"(?P<type>bf16|fp16) mixed precision requires .*(?:GPU|device|PyTorch)"),
        Form(message=r"CUBLAS_STATUS_NOT_SUPPORTED[\s\S]*CUDA_R_16(?P<type>BF)"),
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


DIAGNOSES: tuple[Diagnosis, ...] = (Bf16ModelInFp16(), DtypeUnsupported())
