"""A loss scale that cannot help: it collapses, or it does not move at all."""

from __future__ import annotations

from collections.abc import Iterator

from dsdoctor.case import Case
from dsdoctor.diagnoses import before_run_model, context, remedies
from dsdoctor.diagnoses import loss_scale_told as told
from dsdoctor.diagnoses.base import Diagnosis
from dsdoctor.diagnoses.numerics_precision import Bf16ModelInFp16
from dsdoctor.finding import Finding, Fix
from dsdoctor.loss_scale import MINIMUM_REACHED, LossScaleHistory, LossScaleReading, read
from dsdoctor.runs.facts import Failure


class Collapse(Diagnosis):
    """Every loss scale overflows, down to the smallest: fp16 cannot hold the gradients of this model.

    What it is: the scale was halved at every step until it stood at `fp16.min_loss_scale`, and the gradients were still
    not finite. ZeRO then ends the run with "Current loss scale already at minimum"; without ZeRO (and before 0.6.5)
    every step is skipped for ever, in silence.

    What proves it: an unbroken fall of the scale to its floor. At scale 1 the gradients are not scaled at all, so the
    values themselves leave the range of fp16 (65504), or NaN arises in the model.

    When it could be wrong: a handful of extreme batches in a row would look the same.

    What to do: `{"fp16": {"enabled": false}, "bf16": {"enabled": true}}` where the GPU has it (compute capability 8.0
    and later), else fp32 for the module that overflows first (`dsdoctor nan DS_CONFIG TRAIN.py` names it). The
    widespread advice to raise `initial_scale_power` to 32 is wrong here: an overflow at one scale is an overflow at
    every larger one, and skipped steps change no weights, so the run only passes through more skipped steps before it
    ends the same way. A larger power helps against gradient underflow alone.
    """

    id = "loss-scale/collapse"
    severity = "error"
    title = "every loss scale overflows, down to the smallest"

    def claims(self, failure: Failure, case: Case) -> bool:
        return MINIMUM_REACHED in failure.message

    def examine(self, case: Case) -> Iterator[Finding]:
        for history in context.histories(case):
            reading = context.read(case, history)
            if reading.pattern == "collapse" or _never_applied(history, reading):
                yield self._found(case, history, reading)
                return
        for failure in context.failures(case):
            if self.claims(failure, case):
                yield self._by_exception(case, failure)
                return

    def _found(self, case: Case, history: LossScaleHistory, reading: LossScaleReading) -> Finding:
        nan_loss = history.loss_finite is False
        text = f"{told.steps(reading.skipped)} skipped {_how_far(history)}, and the gradients overflow still"
        if nan_loss:
            text += "; the loss itself is not finite, so no scale can help"
        raised = [context.evidence(f) for f in context.failures(case) if self.claims(f, case)]
        settled = reading.pattern == "collapse"
        return self.finding(
            cause=text,
            evidence=tuple(dict.fromkeys((*raised[:1], *told.proof(history)))),
            confidence=_sure(history) if settled else 0.55,
            role="consequence" if nan_loss or _wrong_precision(case) else "root",
            caveat=_only_counted(history) if settled else "The record ends before the scale reached its floor.",
            fixes=self._fixes(case, nan_loss),
            keys=("fp16.enabled",),
        )

    def _by_exception(self, case: Case, failure: Failure) -> Finding:
        """The scale's own lines are hidden, but the exception that ends the run stands."""
        return self.finding(
            cause="the loss scale reached its minimum and the gradients overflow still",
            evidence=(context.evidence(failure),),
            confidence=0.85,
            fixes=self._fixes(case, False),
            keys=("fp16.enabled",),
        )

    def _fixes(self, case: Case, nan_loss: bool) -> tuple[Fix, ...]:
        if nan_loss:
            return remedies.fixes(case)
        no_raise = Fix(
            text="do not raise initial_scale_power: what overflows at a small scale overflows at every larger one, "
            "so that costs more skipped steps and ends the same"
        )
        precision = remedies.wider_precision(case)
        place = [fix for fix in remedies.fixes(case) if fix.patch is None]
        return (precision, *place, no_raise)


class Static(Diagnosis):
    """A static loss scale (`fp16.loss_scale` above 0) overflows again and again and cannot go down.

    What it is: with `loss_scale` other than 0 DeepSpeed never adapts it. A scale that is too large skips step after
    step; one that is too small hides gradient underflow.

    What proves it: the same scale is attempted again and again and its steps are skipped; before a run the config.

    When it could be wrong: a dynamic scale stands still too with `fp16.hysteresis` 0, with `consecutive_hysteresis` and
    overflows that alternate with clean steps, or under a scaler outside DeepSpeed.

    What to do: `"fp16": {"loss_scale": 0}`, which means dynamic, not off. A checkpoint of ZeRO brings its own scaler:
    resumed from one, the change has no effect unless the optimizer's states are left out.
    """

    id = "loss-scale/static"
    severity = "error"
    title = "a static loss scale overflows and cannot go down"

    def examine(self, case: Case) -> Iterator[Finding]:
        for history in context.histories(case):
            reading = read(history)
            if history.precision != "fp16" or reading.pattern != "stuck":
                continue
            key, kind, fix = _held_by(history)
            yield self.finding(
                cause=f"{kind}: {told.steps(reading.skipped)} skipped at scale {told.scale(history.attempts[0].scale)}",
                evidence=told.proof(history),
                confidence=0.9 if key else 0.7,
                caveat=None if key else "The scale is meant to be dynamic, and the record does not say what holds it.",
                fixes=(fix,),
                keys=(key,) if key else (),
            )
            return
        yield from before_run_model.static_scale(self, case)


def _wrong_precision(case: Case) -> bool:
    """True if the model was trained in bf16, which explains why no scale fits."""
    return any(found.severity == "error" for found in Bf16ModelInFp16().examine(case))


def _never_applied(history: LossScaleHistory, reading: LossScaleReading) -> bool:
    """True if a run ended by itself with every one of its steps skipped."""
    if reading.pattern != "warmup" or reading.settled_at is not None:
        return False
    return history.ended and history.steps_seen is not None and len(history.attempts) >= max(2, history.steps_seen)


def _how_far(history: LossScaleHistory) -> str:
    """How the scale came down, as far as that is known."""
    if history.attempts:
        first, last = history.attempts[0], history.attempts[-1]
        return f"while the scale fell from {told.scale(first.scale)} to {told.scale(last.next_scale)}"
    scales = [count.scale for count in history.counts if count.scale is not None]
    return (
        f"while the scale fell from {told.scale(max(scales))} to {told.scale(scales[-1])}"
        if scales
        else "to the end, all in a row"
    )


def _sure(history: LossScaleHistory) -> float:
    return 0.9 if history.attempts else 0.75


def _only_counted(history: LossScaleHistory) -> str | None:
    if history.attempts:
        return None
    return "Only the counter of skipped steps is in the log: a scale that does not move at all counts alike."


def _held_by(history: LossScaleHistory) -> tuple[str, str, Fix]:
    """The key that keeps the scale where it is ("" where that is not known), in words, and what to write."""
    if not history.dynamic:
        fix = Fix(text="use a dynamic loss scale", patch={"fp16": {"loss_scale": 0}})
        return "fp16.loss_scale", "the static loss scale cannot go down", fix
    if history.hysteresis == 0:
        fix = Fix(text="write 1 or 2", patch={"fp16": {"hysteresis": 2}})
        return "fp16.hysteresis", "hysteresis 0, which counts down below zero, keeps the loss scale from falling", fix
    text = "see what holds it: consecutive_hysteresis, or a scaler outside DeepSpeed"
    return "", "the loss scale does not move", Fix(text=text)


DIAGNOSES: tuple[Diagnosis, ...] = (Collapse(), Static())
