"""Which keys of the ds_config turn fail into pass: runs of changed configs, as long as the time allows."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any

from dsdoctor.blame.bisect import Outcome, OutOfBudget, bisect
from dsdoctor.blame.compare import compare
from dsdoctor.blame.facts import Bisection
from dsdoctor.blame.health import judge
from dsdoctor.blame.plan import Plan, plan
from dsdoctor.blame.signature import alike
from dsdoctor.diagnoses import diagnose
from dsdoctor.runs.facts import Run
from dsdoctor.stages.observe import observe
from dsdoctor.triage import Examination, StageResult, Status
from dsdoctor.units import seconds

AUTOMATIC_SECONDS = 900.0
"""What a bisection that nobody asked for may take."""
_PATIENCE = 3.0
"""A run may take so many times as long as the given one did before it counts as hanging."""
_LEAST_SECONDS = 60.0


def search(examination: Examination) -> StageResult:
    """Suspected keys each on their own, then, where that can change the verdict, delta debugging over all of them."""
    job = examination.job
    planned = plan(examination.case, diagnose(examination.case).findings, job.bisect)
    if planned.why_not:
        return StageResult(name="bisect", status="skipped", why=planned.why_not)
    given = examination.case.run("with-deepspeed")
    assert given is not None
    assert examination.case.config is not None
    runner = _Runner(examination, given, planned)
    found = bisect(
        examination.case.config.data,
        planned.pool,
        suspicions=planned.suspicions,
        runs=runner,
        seen=planned.seen,
    )
    examination.learn(bisection=found)
    if found.untried:
        examination.tell(f"not tried: {'; '.join(found.untried)}")
    status: Status = "failed" if found.verified else "passed" if found.nothing_passes else "warned"
    return StageResult(name="bisect", status=status, why=_told(found), details=asdict(found))


class _Runner:
    """Makes the runs of one bisection and keeps to its time."""

    def __init__(self, examination: Examination, given: Run, planned: Plan) -> None:
        self._examination = examination
        self._given = given
        self._plan = planned
        self._limit = math.inf if examination.job.bisect == "asked" else AUTOMATIC_SECONDS
        self._began = time.monotonic()
        self._longest = given.seconds
        self._number = 0

    def __call__(self, config: Mapping[str, Any], touched: tuple[str, ...], left: int) -> Outcome:
        remaining = self._remaining()
        self._number += 1
        self._say(touched, left)
        try:
            run = self._observe(config, touched, remaining)
        except KeyboardInterrupt:
            self._examination.interrupted = True
            raise OutOfBudget("stopped by the user") from None
        if run.outcome == "interrupted":
            raise OutOfBudget(run.why or "stopped")
        outcome = self._judged(run)
        self._longest = max(self._longest, run.seconds)
        self._examination.tell(f"  {outcome.kind}: {outcome.why} ({seconds(run.seconds)})")
        return outcome

    def _remaining(self) -> float:
        """Seconds that are left; raises OutOfBudget where they do not suffice for another run."""
        job = self._examination.job
        remaining = min(self._limit - (time.monotonic() - self._began), job.remaining())
        if remaining >= self._longest:
            return remaining
        self._examination.out_of_budget = job.remaining() < self._longest
        raise OutOfBudget("the next run would not fit into the time that is left")

    def _say(self, touched: tuple[str, ...], left: int) -> None:
        """What is tried, what remains, how long that takes."""
        shown = ", ".join(touched[:4]) + (f" and {len(touched) - 4} more" if len(touched) > 4 else "")
        more = f"{left} more at most, {seconds(left * self._longest)}" if left else "the last"
        what = f"with {shown} changed" if touched else "as given, once more"
        self._examination.tell(f"bisect, run {self._number} ({more}): {what}")

    def _observe(self, config: Mapping[str, Any], touched: tuple[str, ...], remaining: float) -> Run:
        job = self._examination.job
        run = observe(
            self._examination,
            "proof",
            engine="deepspeed",
            name=f"bisect-{self._number}",
            config=config,
            steps=job.steps if self._plan.steps is None else min(job.steps, self._plan.steps),
            timeout=min(job.timeout, remaining, max(_LEAST_SECONDS, _PATIENCE * self._longest) + job.stall),
        )
        run = replace(run, changed=touched)
        self._examination.learn(runs=(*self._examination.case.runs, run))
        return run

    def _judged(self, run: Run) -> Outcome:
        """Passed is what got past the step in which the given config failed, and does not fail otherwise."""
        health = judge(run)
        if health.failed:
            return Outcome(kind="fails" if alike(self._given, run) else "differs", why=health.why, seconds=run.seconds)
        if not judge(self._given).failed and (apart := self._apart(run)):
            return Outcome(kind="fails", why=apart, seconds=run.seconds)
        steps = min((len(rank.steps) for rank in run.ranks), default=0)
        failed_at = judge(self._given).step
        if steps == 0 or (run.outcome != "finished" and failed_at is not None and steps <= failed_at):
            return Outcome(kind="differs", why=f"it came no further than step {steps}", seconds=run.seconds)
        return Outcome(kind="passes", why=f"{steps} steps", seconds=run.seconds)

    def _apart(self, run: Run) -> str:
        """Where the failure is that the losses move away from those without DeepSpeed: whether these do too."""
        plain = self._examination.case.run("without-deepspeed")
        step = compare(run, plain).apart_from if plain is not None else None
        return "" if step is None else f"moves away from the run without DeepSpeed from step {step} on"


def _told(found: Bisection) -> str:
    """The result in one line."""
    runs = f"{len(found.trials)} runs"
    if found.keys:
        sure = "; ".join((runs, *_how_sure(found)))
        return f"passes once {' and '.join(found.keys)} {_is(found.keys)} changed ({sure})"
    if found.stopped:
        return f"nothing found yet in {runs}: {found.stopped}"
    what = "no config that was tried passes" if found.searched else "no suspected key explains it"
    masked = f"; another failure shows once {', '.join(found.masked)} {_is(found.masked)} changed"
    return f"{what} ({runs}){masked if found.masked else ''}"


def _how_sure(found: Bisection) -> Iterator[str]:
    if found.given is not None and found.given.runs > 1:
        yield f"failed {found.given} times as given, {found.changed} changed"
    if not found.verified:
        yield "not proved"
    if not found.minimal:
        yield "maybe more than needed"
    if found.stopped:
        yield found.stopped


def _is(keys: tuple[str, ...]) -> str:
    return "is" if len(keys) == 1 else "are"
