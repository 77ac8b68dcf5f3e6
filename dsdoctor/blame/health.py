"""Did a run fail? One judgement of one run, from its facts alone.

A run fails when a rank raises, is killed or hangs, when a loss, gradient, weight or input is non-finite (after the
loss-scale search), or when it skips every step to the end. Warm-up of the loss scale, periodic overflow and what
happens to a process after it did its work are no failures.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from dsdoctor import loss_scale
from dsdoctor.blame import stopped
from dsdoctor.runs.facts import RankRun, Run, Step

Trouble = Literal[
    "raised", "exited", "killed", "hung", "timeout", "not-started", "non-finite", "collapse", "all-skipped", "diverged"
]
NUMERIC: tuple[Trouble, ...] = ("non-finite", "collapse", "all-skipped")
_OF_PROCESS: dict[str, Trouble] = {
    "raised": "raised",
    "exited": "exited",
    "killed": "killed",
    "out-of-memory": "killed",
    "hung": "hung",
    "timeout": "timeout",
    "not-started": "not-started",
}


@dataclass(frozen=True, kw_only=True)
class Health:
    """The judgement. `trouble` is None for a run that did not fail; `step` and `rank` say where it began.

    A run alone cannot be `diverged`: that is what `blame.compare` makes of two of them.
    """

    trouble: Trouble | None = None
    why: str = ""
    step: int | None = None
    rank: int | None = None
    refused_type: bool = False
    """An operation refused the types of the config's precision."""

    @property
    def failed(self) -> bool:
        return self.trouble is not None

    @property
    def numeric(self) -> bool:
        """The numbers went wrong, whatever became of the processes afterwards."""
        return self.trouble in NUMERIC

    @property
    def of_the_precision(self) -> bool:
        """The precision could be why, which a run in fp32 shows."""
        return self.numeric or self.refused_type


def judge(run: Run) -> Health:
    """Judge a run. Bad numbers come first: an exception after a NaN is mostly the NaN's doing."""
    return _numbers(run) or _processes(run) or Health()


def _numbers(run: Run) -> Health | None:
    """The earliest sign of bad numbers on any rank, then the signs that need the whole run."""
    signs = [sign for rank in run.ranks for step in rank.steps if (sign := _sign(run, rank, step))]
    if signs:
        return min(signs, key=lambda sign: (sign.step or 0, sign.rank or 0))
    if run.loss_scale is not None and loss_scale.read(run.loss_scale).pattern in ("collapse", "stuck"):
        first = run.loss_scale.attempts[0]
        return Health(trouble="collapse", why="every loss scale down to the floor overflows", step=first.step, rank=0)
    if ended := stopped.for_its_numbers(run):
        rank, words = ended
        return Health(trouble="non-finite", why=f"rank {rank.rank} stopped: {words}", step=_at(rank), rank=rank.rank)
    steps = run.ranks[0].steps if run.ranks else ()
    if len(steps) >= 2 and all(step.skipped for step in steps):
        return Health(trouble="all-skipped", why=f"all {len(steps)} steps were skipped", step=0, rank=0)
    return None


def _at(rank: RankRun) -> int:
    """The step that a rank was in when it ended."""
    return rank.failure.step if rank.failure is not None and rank.failure.step is not None else rank.last_step


def _sign(run: Run, rank: RankRun, step: Step) -> Health | None:
    """What is non-finite in this step, if it is no part of the search for a loss scale."""
    for losses, of in ((step.losses, ""), (step.other_losses, " of another engine")):
        bad_loss = next((loss for loss in losses if not math.isfinite(loss)), None)
        if bad_loss is not None:
            return _non_finite(f"the loss{of} is {bad_loss}", rank, step)
    searching = run.facts is not None and run.facts.dynamic_loss_scale and step.skipped
    if searching:
        return None
    if step.grad_norm is not None and not math.isfinite(step.grad_norm):
        return _non_finite(f"the gradient norm is {step.grad_norm}", rank, step)
    if step.skipped:
        return _non_finite("DeepSpeed skipped the step for a non-finite gradient", rank, step)
    return None


def _non_finite(why: str, rank: RankRun, step: Step) -> Health:
    where = f"in step {step.index} on rank {rank.rank}"
    return Health(trouble="non-finite", why=f"{why} {where}", step=step.index, rank=rank.rank)


def _processes(run: Run) -> Health | None:
    """What became of the processes."""
    trouble = _OF_PROCESS.get(run.outcome)
    if trouble is None:
        return None
    if run.outcome == "raised" and run.failures:
        first = run.failures[0]
        message = first.message.strip().splitlines()[0] if first.message.strip() else ""
        why = f"rank {first.rank} raised {first.type}: {message}".rstrip(": ")
        refused = stopped.for_a_type(run)
        return Health(trouble=trouble, why=why, step=first.step, rank=first.rank, refused_type=refused)
    return Health(trouble=trouble, why=run.why or trouble, step=max((r.last_step for r in run.ranks), default=None))
