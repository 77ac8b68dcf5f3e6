"""From a suspicion that is certain to what the user reads: second look, report, patch. Runs in rank processes only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import nn

from dsdoctor.finding import FirstBad
from dsdoctor.numerics import again, engines
from dsdoctor.numerics.again import Batch
from dsdoctor.numerics.announcing import Announcer
from dsdoctor.numerics.batches import Call
from dsdoctor.numerics.events import Event, Origin
from dsdoctor.numerics.patch import fp32_patch
from dsdoctor.numerics.replay import NotReplayable
from dsdoctor.numerics.report import hit_report
from dsdoctor.numerics.steps import look_at_old_weights
from dsdoctor.numerics.weights import WeightWatch

OnFirstBad = Callable[[FirstBad, str, str], None]
"""Called with the finding, the report and the patch."""
_KEPT = 64
"""Batches of one optimizer step whose inputs are remembered for a second run."""
_NOT_AGAIN = Origin(cause="not-reproducible", detail="a second run of the batch's forward was finite")


class Publisher:
    """Tells of the first bad value of this rank, once; and once more where the first report had no frames.

    `first_bad` and `again` are what was told.
    """

    def __init__(
        self,
        model: nn.Module,
        weights: WeightWatch,
        announcer: Announcer,
        on_first_bad: OnFirstBad | None,
        problem: Callable[[Exception], None],
    ) -> None:
        self.first_bad: FirstBad | None = None
        self.again: FirstBad | None = None
        self._model = model
        self._weights = weights
        self._announcer = announcer
        self._on_first_bad = on_first_bad
        self._problem = problem
        self._rank = engines.rank()
        self._class_names = {name: type(module).__name__ for name, module in model.named_modules()}

    def publish(self, event: Event) -> None:
        """Tell, unless all was told. A report without frames is followed by none but one with frames."""
        first = self.first_bad is None
        if self.again is not None or not (first or event.frames):
            return
        event = self._with_growth(event)
        rank = engines.rank() or self._rank
        found = event.first_bad(rank)
        report, patch = hit_report(event, rank), fp32_patch(event, self._class_names.get(event.module, ""))
        self.first_bad = self.first_bad or found
        if event.frames:
            self.again = found
        try:
            if not first:
                self._announcer.again(report, patch)
            elif self._on_first_bad is not None:
                self._on_first_bad(found, report, patch)
            else:
                self._announcer.first_bad(found, report, patch, order=event.order)
        except Exception as error:
            self._problem(error)

    def _with_growth(self, event: Event) -> Event:
        """An overflow of weights that grew out of all bounds since the first step is the weights' doing."""
        growth = self._weights.growth()
        from_values = event.origin.cause in ("overflow", "inf-minus-inf", "unknown")
        if growth is None or event.phase not in ("forward", "loss") or not from_values:
            return event
        detail = f"the largest weight is {growth:.3g} times what it was in the first step; {event.origin.detail}"
        return event.explained(replace(event.origin, cause="exploded-weights", detail=detail.rstrip("; ")))


class SecondLook:
    """What the weights, and a second run of the batch, tell of a value that the sentinel saw.

    Batches of the running step are kept (by reference) only if `replays`.
    """

    def __init__(
        self, model: nn.Module, weights: WeightWatch, make: again.MakeEvent, frames: int, *, replays: bool
    ) -> None:
        self._model = model
        self._weights = weights
        self._make = make
        self._frames = frames
        self._replays = replays
        self._kept: list[Batch] = []

    def keep(self, batch: int, micro_step: int, call: Call) -> None:
        """A batch's forward begins."""
        if self._replays and len(self._kept) < _KEPT:
            self._kept.append(Batch.now(batch, micro_step, *call))

    def forget(self) -> None:
        """The step's batches were judged."""
        self._kept.clear()

    def at(self, event: Event) -> Event:
        """The event, as exactly as it can be told now.

        Raises:
            Exception: whatever the model's own forward raised in the second run.
        """
        event = look_at_old_weights(self._model, self._weights, event) or event
        batch = next((b for b in self._kept if b.number == event.batch), None)
        if batch is None or event.phase not in ("input", "parameter", "forward", "loss"):
            return event
        try:
            found = again.framed(self._model, batch, self._make, self._frames)
        except NotReplayable as reason:
            return event.explained(replace(event.origin, detail=f"the batch was not run again: {reason}"))
        if found is None:
            return event if event.phase == "loss" else event.explained(_NOT_AGAIN)
        return replace(found, step=event.step)
