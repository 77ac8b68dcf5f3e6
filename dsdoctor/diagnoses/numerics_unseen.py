"""Trouble with numbers under which nothing fails: gradients flushed to zero, steps skipped in silence."""

from __future__ import annotations

from collections.abc import Iterator

from dsdoctor.case import Case
from dsdoctor.diagnoses import context, log_numbers, remedies
from dsdoctor.diagnoses.base import Diagnosis
from dsdoctor.finding import Evidence, Finding, Fix
from dsdoctor.logs.facts import LogFacts
from dsdoctor.loss_scale import LossScaleHistory


class Underflow(Diagnosis):
    """The gradients are flushed to zero in fp16.

    What it is: a gradient below about 2^-24 / loss scale is zero in fp16. With a small scale the model then does not
    learn although nothing fails.

    What proves it: the gradient norm is exactly zero over several applied steps of an fp16 run with a finite loss that
    is not zero. In a log the learning rate must not stand at 0, which would mean that no step was applied at all.

    When it could be wrong: frozen parameters, a loss that does not depend on the model or fully masked labels give zero
    gradients in any precision; and DeepSpeed up to 0.19.6 shows a norm of 0 where the first steps are skipped.

    What to do: this is the one case for a *larger* scale: `fp16.initial_scale_power` 20 to 24, or `loss_scale_window`
    100 to 200 so that it climbs sooner; or bf16. First see that a gradient is there in fp32 at all.
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

    What to do: `dsdoctor nan DS_CONFIG TRAIN.py` finds the first non-finite module. `engine.skipped_steps` counts such
    steps in any release.
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


DIAGNOSES: tuple[Diagnosis, ...] = (SilentSkip(), Underflow())
