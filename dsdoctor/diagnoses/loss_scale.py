"""What an fp16 loss scale did: search, probes, trouble. The arithmetic is in `dsdoctor.loss_scale`."""

from __future__ import annotations

import math
from collections.abc import Iterator

from dsdoctor.case import Case
from dsdoctor.diagnoses import context, remedies
from dsdoctor.diagnoses.base import Diagnosis
from dsdoctor.finding import Evidence, Finding, Fix
from dsdoctor.logs.facts import LogFacts
from dsdoctor.loss_scale import LossScaleHistory, LossScaleReading, ScaleAttempt, SkipCount, read
from dsdoctor.runs.facts import Failure

MINIMUM_REACHED = "Current loss scale already at minimum"
HIDDEN_SINCE = (0, 17, 6)
"""First release whose logger does not show overflow lines by default."""

FROZEN_RATES = 5
"""Lines with a learning rate of 0 after which it is no longer a warm-up that has just begun."""

_FP32 = Fix(
    text="train in fp32, or keep the overflowing module in fp32 (dsdoctor nan names it)",
    patch={"fp16": {"enabled": False}},
)
_BF16 = Fix(
    text="train in bf16, which has the range of fp32 (GPUs of compute capability 8.0 and later)",
    patch={"fp16": {"enabled": False}, "bf16": {"enabled": True}},
)


class WarmUp(Diagnosis):
    """The dynamic loss scale was searching downward in the first steps, and then held.

    What it is: fp16 training starts with a large loss scale (2^16 by default) and halves it at each overflow until the
    gradients fit. Each overflow costs one skipped step. Nearly every healthy fp16 run begins this way.

    What proves it: the overflows stand in one fall at the start, the scale settles above the floor, and the steps
    after it are applied.

    When it could be wrong: a log or run that ends while the scale still falls cannot tell a search from a collapse;
    the finding then says that the scale has not settled.

    What to do: nothing. To save the skipped steps, set `fp16.initial_scale_power` to log2 of the scale that held.
    A larger power only makes the search longer.
    """

    id = "loss-scale/warmup"
    severity = "info"
    title = "the loss scale searched downward at the start, then held"

    def examine(self, case: Case) -> Iterator[Finding]:
        for history in context.histories(case):
            reading = context.read(case, history)
            searched = reading.pattern == "warmup" or (reading.pattern == "outliers" and reading.warmup_skips > 0)
            if searched and history.loss_finite is not False:
                yield self._found(history, reading)
                return

    def _unsettled(self, history: LossScaleHistory, steps: str) -> Finding:
        """The scale that held is not known: the record ends too early, or only a counter tells of the skips."""
        if not history.attempts:
            return self.finding(
                cause=f"{steps} skipped at the start and none after that, by the counter of skipped steps",
                evidence=_proof(history),
                confidence=0.85,
            )
        last = history.attempts[-1].next_scale
        return self.finding(
            cause=f"{steps} skipped at the start; the scale had come down to {_scale(last)} when the record ends",
            evidence=_proof(history),
            confidence=0.5,
            caveat="The record ends before the scale settled, so this could still become a collapse.",
        )

    def _found(self, history: LossScaleHistory, reading: LossScaleReading) -> Finding:
        steps = _steps(reading.warmup_skips)
        if reading.settled_at is None:
            return self._unsettled(history, steps)
        fixes: tuple[Fix, ...] = ()
        if reading.recommended_power is not None:
            fixes = (_start_at(reading.recommended_power, "optional: start where the scale settled and skip no step"),)
        later = reading.skipped - reading.warmup_skips
        odd = f"; {_steps(later)} skipped later, now and then" if later else ""
        return self.finding(
            cause=f"{steps} skipped at the start, then the scale held at {_scale(reading.settled_at)}{odd}",
            evidence=_proof(history),
            confidence=0.95,
            fixes=fixes,
            keys=("fp16.initial_scale_power",),
        )


class Periodic(Diagnosis):
    """The loss scale grows after each stable window and overflows once: its steady state.

    What it is: after `fp16.loss_scale_window` clean steps DeepSpeed doubles the scale to see whether it still fits. If
    not, a few steps (as many as `hysteresis`, 2 by default) are skipped and the scale comes back.

    What proves it: each overflow comes right after the scale had grown, about `loss_scale_window + 1 + hysteresis`
    steps after the one before (0.17.1 and later; one less in older releases).

    When it could be wrong: where the log has no step numbers, only the growth of the scale is looked at.

    What to do: nothing. A larger `loss_scale_window` wastes fewer steps.
    """

    id = "loss-scale/periodic"
    severity = "info"
    title = "the loss scale probes a larger value now and then"

    def examine(self, case: Case) -> Iterator[Finding]:
        for history in context.histories(case):
            reading = context.read(case, history)
            if reading.pattern == "periodic":
                probes = reading.skipped - reading.warmup_skips
                window = f" of {history.window} steps" if history.window else ""
                holds = f"; it holds at {_scale(reading.settled_at)}" if reading.settled_at is not None else ""
                when = (
                    "right after the scale had grown, once a window"
                    if history.attempts
                    else "now and then, once a window"
                )
                yield self.finding(
                    cause=f"{_steps(probes)} skipped {when}{window}{holds}",
                    evidence=_proof(history, skip=reading.warmup_skips),
                    confidence=0.9,
                    fixes=(Fix(text="optional: a larger fp16.loss_scale_window wastes fewer steps"),),
                    keys=("fp16.loss_scale_window",),
                )
                return


class Thrash(Diagnosis):
    """Many steps are skipped long after the loss scale had settled.

    What it is: gradients overflow again and again although the scale has found its place: they grow, or single batches
    make them explode. Skipped steps change no weights, so the model learns from fewer steps than the progress bar
    counts, and a scheduler that counts all of them is ahead.

    What proves it: at least five overflows after the search that did not come right after the scale had grown, and more
    than 1 % of the steps.

    When it could be wrong: a log that lacks a part of its steps makes the share look larger.

    What to do: find the first non-finite module with `dsdoctor nan`; look at learning rate, data and normalisation;
    bf16 does away with the scale altogether.
    """

    id = "loss-scale/thrash"
    severity = "warning"
    title = "steps are skipped long after the loss scale had settled"

    def examine(self, case: Case) -> Iterator[Finding]:
        for history in context.histories(case):
            reading = context.read(case, history)
            if reading.pattern == "thrash":
                share = f" ({reading.late_share:.1%} of the later steps)" if reading.late_share is not None else ""
                late = reading.skipped - reading.warmup_skips
                yield self.finding(
                    cause=f"{_steps(late)} skipped after the scale had settled{share}, not once a window",
                    evidence=_proof(history, skip=reading.warmup_skips),
                    confidence=0.85 if reading.late_share is not None else 0.6,
                    caveat="Progress bars count skipped steps too: fewer updates were made than they show.",
                    fixes=(
                        Fix(text="find the module that overflows first: dsdoctor nan DS_CONFIG TRAIN.py"),
                        Fix(text="look at the learning rate, its warm-up, and at the batches of the skipped steps"),
                        _FP32 if context.bf16_supported(case) is False else _BF16,
                    ),
                    keys=("fp16.enabled",),
                )
                return


class Collapse(Diagnosis):
    """Every loss scale overflows, down to the smallest: fp16 cannot hold the gradients of this model.

    What it is: the scale was halved at every step until it stood at `fp16.min_loss_scale`, and the gradients were still
    not finite. ZeRO then ends the run with "Current loss scale already at minimum"; without ZeRO (and before 0.6.5)
    every step is skipped for ever, in silence.

    What proves it: an unbroken fall of the scale to its floor. At scale 1 the gradients are not scaled at all, so the
    values themselves leave the range of fp16 (65504), or NaN arises in the model.

    When it could be wrong: a handful of extreme batches in a row would look the same.

    What to do: bf16 where the GPU has it, else fp32 for the module that overflows first (`dsdoctor nan` names it). The
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
        text = f"{_steps(reading.skipped)} skipped {_how_far(history)}, and the gradients overflow still"
        if nan_loss:
            text += "; the loss itself is not finite, so no scale can help"
        raised = [context.evidence(f) for f in context.failures(case) if self.claims(f, case)]
        settled = reading.pattern == "collapse"
        return self.finding(
            cause=text,
            evidence=tuple(dict.fromkeys((*raised[:1], *_proof(history)))),
            confidence=_sure(history) if settled else 0.55,
            role="consequence" if nan_loss else "root",
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
        precision = _FP32 if context.bf16_supported(case) is False else _BF16
        place = [fix for fix in remedies.fixes(case) if fix.patch is None]
        return (precision, *place, no_raise)


class Static(Diagnosis):
    """A static loss scale (`fp16.loss_scale` above 0) overflows again and again and cannot go down.

    What it is: with `loss_scale` other than 0 DeepSpeed never adapts it. A scale that is too large skips step after
    step; one that is too small hides gradient underflow.

    What proves it: the same scale is attempted again and again and its steps are skipped.

    When it could be wrong: a scaler outside DeepSpeed may hold the scale still as well.

    What to do: set `fp16.loss_scale` to 0, which means dynamic.
    """

    id = "loss-scale/static"
    severity = "error"
    title = "a static loss scale overflows and cannot go down"

    def examine(self, case: Case) -> Iterator[Finding]:
        for history in context.histories(case):
            if history.precision != "fp16" or read(history).pattern != "stuck":
                continue
            scale = history.attempts[0].scale
            kind = "the loss scale does not move" if history.dynamic else "the static loss scale cannot go down"
            yield self.finding(
                cause=f"{kind}: {_steps(len(history.attempts))} skipped at scale {_scale(scale)}",
                evidence=_proof(history),
                confidence=0.7 if history.dynamic else 0.9,
                caveat=_hysteresis_caveat(history) if history.dynamic else None,
                fixes=(Fix(text="use a dynamic loss scale", patch={"fp16": {"loss_scale": 0}}),),
                keys=("fp16.loss_scale",),
            )
            return


class Hidden(Diagnosis):
    """The log could not have shown overflows, so that it shows none proves nothing.

    What it is: from DeepSpeed 0.17.6 on the logger prints warnings only, while the lines about overflows and skipped
    steps have the level INFO. A run that skipped every step may print nothing at all.

    What proves it: fp16 with a dynamic scale, such a release, and not one INFO line of DeepSpeed's engine in the log
    (the launcher still prints INFO).

    When it could be wrong: the run may well have been healthy; the finding is about the log.

    What to do: `"log_level": "info"` in the ds_config (0.19.3 and later), or look at `engine.skipped_steps`.
    """

    id = "loss-scale/hidden"
    severity = "warning"
    title = "the log could not have shown skipped steps"

    def examine(self, case: Case) -> Iterator[Finding]:
        logs = case.logs
        if logs is None or logs.loss_scale is not None or context.precision(case) != "fp16":
            return
        version = context.deepspeed_version(case)
        if version is None or version < HIDDEN_SINCE or any(logs.of_kind("engine-info")):
            return
        if context.config_value(case, "fp16.loss_scale") or logs.steps_seen == 0 or logs.failures:
            return
        signs = [event.evidence() for event in logs.of_kind("fp16-enabled", "deepspeed-version", "fp16-flag")]
        signs[2:] = frozen_rate(logs)
        name = ".".join(map(str, version))
        yield self.finding(
            cause=f"fp16 with a dynamic scale on DeepSpeed {name}, whose logger hides overflow lines: none are shown, "
            "which proves nothing",
            evidence=tuple(dict.fromkeys(signs))[:3],
            confidence=0.8,
            fixes=(
                Fix(text="make the lines visible and run again (0.19.3 and later)", patch={"log_level": "info"}),
                Fix(text="or print engine.skipped_steps (in any release) beside engine.global_steps"),
            ),
            keys=("log_level",),
        )


def frozen_rate(logs: LogFacts) -> tuple[Evidence, ...]:
    """Where a learning rate of 0 stands that never moves: a scheduler that waits for the first applied step."""
    rates = logs.series_of("lr")
    points = rates.points if rates is not None else ()
    if len(points) < FROZEN_RATES or any(point.value != 0 for point in points):
        return ()
    return (points[-1].evidence,)


def _never_applied(history: LossScaleHistory, reading: LossScaleReading) -> bool:
    """True if a run ended by itself with every one of its steps skipped."""
    if reading.pattern != "warmup" or reading.settled_at is not None:
        return False
    return history.ended and history.steps_seen is not None and len(history.attempts) >= max(2, history.steps_seen)


def _how_far(history: LossScaleHistory) -> str:
    """How the scale came down, as far as that is known."""
    if history.attempts:
        first, last = history.attempts[0], history.attempts[-1]
        return f"while the scale fell from {_scale(first.scale)} to {_scale(last.next_scale)}"
    scales = [count.scale for count in history.counts if count.scale is not None]
    return (
        f"while the scale fell from {_scale(max(scales))} to {_scale(scales[-1])}"
        if scales
        else "to the end, all in a row"
    )


def _sure(history: LossScaleHistory) -> float:
    return 0.9 if history.attempts else 0.75


def _only_counted(history: LossScaleHistory) -> str | None:
    if history.attempts:
        return None
    return "Only the counter of skipped steps is in the log: a scale that does not move at all counts alike."


def _hysteresis_caveat(history: LossScaleHistory) -> str:
    if history.hysteresis == 0:
        return "fp16.hysteresis is 0, which DeepSpeed accepts and which keeps the scale from ever falling."
    return "The scale is meant to be dynamic: hysteresis 0, consecutive_hysteresis or a scaler outside hold it still."


def _start_at(power: int, text: str) -> Fix:
    return Fix(text=f"{text}: initial_scale_power {power}", patch={"fp16": {"initial_scale_power": power}})


def _proof(history: LossScaleHistory, *, skip: int = 0) -> tuple[Evidence, ...]:
    """The first, the second and the last overflow after the first `skip`; or where a counter of them grew."""
    if not history.attempts:
        return _counted(history, skip)
    attempts = history.attempts[skip:]
    chosen = [*attempts[:2], *attempts[2:][-1:]]
    return tuple(attempt.evidence or _in_words(history, attempt) for attempt in chosen)


def _counted(history: LossScaleHistory, skip: int) -> tuple[Evidence, ...]:
    """The lines at which the counter passes `skip`, and the last one at which it grew."""
    before = (SkipCount(step=0, skipped=0), *history.counts)
    grew = [now for old, now in zip(before, history.counts, strict=False) if now.skipped > old.skipped]
    chosen = [count for count in grew if count.skipped > skip]
    return tuple(count.evidence for count in [*chosen[:1], *chosen[1:][-1:]] if count.evidence is not None)


def _in_words(history: LossScaleHistory, attempt: ScaleAttempt) -> Evidence:
    text = f"overflow at scale {_scale(attempt.scale)}, next {_scale(attempt.next_scale)}"
    return Evidence(source=history.source, step=attempt.step, text=text)


def _steps(count: int) -> str:
    return "1 step was" if count == 1 else f"{count} steps were"


def _scale(scale: float | None) -> str:
    """A scale with its power of two: `1024 (2^10)`."""
    if scale is None or scale <= 0:
        return str(scale)
    power = math.log2(scale)
    return f"{scale:.10g} (2^{power:.0f})" if power.is_integer() and power else f"{scale:.10g}"


DIAGNOSES: tuple[Diagnosis, ...] = (Collapse(), Static(), Thrash(), Hidden(), WarmUp(), Periodic())
