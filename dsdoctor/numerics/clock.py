"""Where a run is: optimizer step, micro-step and batch, each counted from 0. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Clock:
    """`step` counts optimizer steps attempted, skipped ones included; `batch` is the number of the last batch begun.

    The micro-step is what the engine was asked to do since the last step. Where no engine is asked (a plain module, the
    stages of a pipeline), `by_forwards` counts the forwards since then instead.
    """

    step: int = 0
    backwards: int = 0
    step_calls: int = 0
    forwards: int = 0
    batch: int = -1
    by_forwards: bool = False

    @property
    def micro_step(self) -> int:
        return max(0, self.forwards - 1) if self.by_forwards else max(self.backwards, self.step_calls)

    @property
    def last_micro_step(self) -> int:
        """The micro-step at whose end an optimizer step is taken."""
        return self.micro_step if self.by_forwards else max(self.backwards - 1, self.step_calls)

    def stepped(self) -> None:
        """An optimizer step was attempted."""
        self.step += 1
        self.backwards = self.step_calls = self.forwards = 0
