"""When an observed run ends, and how: after a number of attempted optimizer steps, on all ranks together.

Runs in rank processes only; imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from dsdoctor.runs.facts import EngineFacts, Step
from dsdoctor.runs.session import RankSession

AFTER_STOP_SECONDS = 60.0
"""How long the script may clean up after it was stopped (its `finally` blocks run) before the process ends."""

RAISE_AT_MOST = 3


class RunStopped(SystemExit):
    """Raised out of a DeepSpeed call of the script once the run has seen enough; private to dsdoctor."""

    def __init__(self) -> None:
        super().__init__(0)


class StopRule:
    """Counts attempted optimizer steps and ends the run after `spec.steps` of them.

    While a dynamic loss scale still searches downwards (the last step overflowed, and its scale was above the floor)
    the run goes on, by `spec.patient_steps` at the most. Every rank must come to the same decision without talking:
    the overflow flag is reduced over all ranks and the scale follows from it, whereas a loss is known to one rank
    only, so losses are not asked.
    """

    def __init__(self, session: RankSession, end_after: Callable[[float], None]) -> None:
        """`end_after(seconds)` ends the process so much later if it is still there, at once for 0."""
        self._session = session
        self._end_after = end_after
        self._attempted = 0
        self._raised = 0

    def after_step(self, step: Step, facts: EngineFacts | None) -> None:
        """Count a step; raises `RunStopped` when it was the last one."""
        self._attempted += 1
        spec = self._session.spec
        if self._attempted < spec.steps:
            return
        if self._attempted < spec.steps + spec.patient_steps and still_falling(step, facts):
            return
        self.stop("steps")

    def again(self) -> None:
        """Raise once more where the script caught `RunStopped` and went on; end the process if that does not help."""
        if self._session.stopped:
            self._raise()

    def stop(self, reason: Literal["steps", "probe"]) -> None:
        """Write the stop, start the clock for the script's own cleaning up, and raise."""
        self._session.stopped = True
        self._session.trace.stop(reason)
        self._end_after(AFTER_STOP_SECONDS)
        self._raise()

    def _raise(self) -> None:
        self._raised += 1
        if self._raised > RAISE_AT_MOST:
            self._end_after(0)
        raise RunStopped


def still_falling(step: Step, facts: EngineFacts | None) -> bool:
    """Whether the dynamic loss scale is on its way down at this step: skipped, and not yet attempted at the floor."""
    if facts is None or not facts.dynamic_loss_scale or not step.skipped or step.loss_scale is None:
        return False
    floor = facts.min_loss_scale
    return floor is None or step.loss_scale > floor
