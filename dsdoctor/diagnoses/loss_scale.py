"""A dynamic loss scale at work: its search at the start, its probes, and steps lost without such a reason.

The arithmetic is in `dsdoctor.loss_scale`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from dsdoctor.case import Case
from dsdoctor.diagnoses import context, remedies
from dsdoctor.diagnoses import loss_scale_told as told
from dsdoctor.diagnoses.base import Diagnosis
from dsdoctor.finding import Finding, Fix
from dsdoctor.loss_scale import MANY, LossScaleHistory, LossScaleReading


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
                evidence=told.proof(history),
                confidence=0.85,
            )
        last = history.attempts[-1].next_scale
        return self.finding(
            cause=f"{steps} skipped at the start; the scale had come down to {told.scale(last)} when the record ends",
            evidence=told.proof(history),
            confidence=0.5,
            caveat="The record ends before the scale settled, so this could still become a collapse.",
        )

    def _found(self, history: LossScaleHistory, reading: LossScaleReading) -> Finding:
        steps = told.steps(reading.warmup_skips)
        if reading.settled_at is None:
            return self._unsettled(history, steps)
        fixes: tuple[Fix, ...] = ()
        if reading.recommended_power is not None:
            fixes = (_start_at(reading.recommended_power, "optional: start where the scale settled and skip no step"),)
        later = reading.skipped - reading.warmup_skips
        odd = f"; {told.steps(later)} skipped later, now and then" if later else ""
        return self.finding(
            cause=f"{steps} skipped at the start, then the scale held at {told.scale(reading.settled_at)}{odd}",
            evidence=told.proof(history),
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

    What to do: nothing. A larger `fp16.loss_scale_window` (1000 by default) wastes fewer steps.
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
                holds = f"; it holds at {told.scale(reading.settled_at)}" if reading.settled_at is not None else ""
                when = (
                    "right after the scale had grown, once a window"
                    if history.attempts
                    else "now and then, once a window"
                )
                yield self.finding(
                    cause=f"{told.steps(probes)} skipped {when}{window}{holds}",
                    evidence=told.proof(history, skip=reading.warmup_skips),
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

    What to do: `dsdoctor nan DS_CONFIG TRAIN.py` names the first non-finite module; look at the learning rate and its
    warm-up, at the batches of the skipped steps, at normalisation layers; `"bf16": {"enabled": true}` does away with
    the scale altogether. Clipping cannot help: it comes after the check for overflow.
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
                doubt = _doubt(case, history)
                yield self.finding(
                    cause=f"{told.steps(late)} skipped after the scale had settled{share}, not once a window",
                    evidence=told.proof(history, skip=reading.warmup_skips),
                    confidence=0.5 if doubt else (0.85 if reading.late_share is not None else 0.6),
                    caveat=doubt or "Progress bars count skipped steps too: fewer updates were made than they show.",
                    fixes=(
                        Fix(text="find the module that overflows first: dsdoctor nan DS_CONFIG TRAIN.py"),
                        Fix(text="look at the learning rate, its warm-up, and at the batches of the skipped steps"),
                        remedies.wider_precision(case),
                    ),
                    keys=("fp16.enabled",),
                )
                return


def _doubt(case: Case, history: LossScaleHistory) -> str | None:
    """What else these skips could be, None where the record tells enough."""
    if not history.attempts and context.precision(case) is None and not any(c.scale for c in history.counts):
        return "Only a counter of skipped steps is in this record. In bf16 no step is skipped for the sake of a scale."
    last = history.attempts[-MANY:]
    falls = all(after.scale == before.next_scale < before.scale for before, after in pairwise(last))
    if not history.ended and len(last) == MANY and falls:
        return "The record ends while the scale falls step by step: that may become a collapse."
    return None


def _start_at(power: int, text: str) -> Fix:
    return Fix(text=f"{text}: initial_scale_power {power}", patch={"fp16": {"initial_scale_power": power}})


DIAGNOSES: tuple[Diagnosis, ...] = (Thrash(), WarmUp(), Periodic())
