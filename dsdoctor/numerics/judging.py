"""Judges each micro-step: what its forward left open, by what its loss and its gradients turned out to be.

The hooks that frame modules tell at once, the sentinel tells once per optimizer step what happened since the last one;
the ledger hears the same story either way. Runs in rank processes only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from dsdoctor.finding import FirstBad, Phase
from dsdoctor.numerics import engines
from dsdoctor.numerics.causes import explain_gradient
from dsdoctor.numerics.clock import Clock
from dsdoctor.numerics.events import Event
from dsdoctor.numerics.ledger import Ledger
from dsdoctor.numerics.outside import Outside
from dsdoctor.numerics.readings import Story, stories
from dsdoctor.numerics.stats import Range, measure
from dsdoctor.numerics.steps import Gradients
from dsdoctor.numerics.watches import Watches


class Host(Protocol):
    """What the judgement asks of the detector."""

    clock: Clock

    @property
    def first_bad(self) -> FirstBad | None: ...
    @property
    def again(self) -> FirstBad | None: ...
    def event(self, phase: Phase, module: str, tensor: str, kind: str, dtype: torch.dtype) -> Event: ...
    def publish(self, event: Event | None) -> None: ...
    def warn(self, text: str) -> None: ...


class Judge:
    """Hears of losses, gradients and readings of one detector. `gradients` are those since the last optimizer step."""

    def __init__(self, engine: Any, model: nn.Module, host: Host, ledger: Ledger) -> None:
        self.gradients = Gradients()
        self.watches: Watches
        self._engine = engine
        self._model = model
        self._host = host
        self._ledger = ledger
        self._outside = Outside(model)
        self._gradient: Event | None = None
        self._low_precision = False

    def batch_begins(self) -> None:
        """A batch of training begins: judge the one before it, where frames were taken and no backward did so.

        A pipeline begins the next forward before it has run the last one's backward: it is judged at its step.
        """
        self._outside.stop()
        forward = self.watches.forward
        if forward is not None and self._host.again is None and not engines.is_pipeline(self._engine):
            if self.watches.measured.seen:
                self.after_backward()
            if forward.output_bad:
                self._host.publish(self._ledger.earliest())
        if self.watches.sentinel is not None and self.watches.sentinel.is_filling_up:
            self.read()
        autocast = engines.autocast_in_force()
        self._low_precision |= autocast is not None and autocast[1] is torch.float16

    def batch_ended(self, *, raised: bool) -> None:
        """The root's forward ended. A bad loss among its outputs decides at once."""
        forward = self.watches.forward
        if forward is not None and forward.suspecting:
            forward.output_bad |= raised and torch.is_grad_enabled()
            if forward.loss_bad:
                self._host.publish(self._ledger.earliest())
            if self._engine is not None and self._host.again is None:
                self._outside.go_on()

    def loss(self, loss: Tensor) -> None:
        """The loss that an engine is about to run backward from."""
        self._outside.stop()
        if self.watches.sentinel is not None:
            self.watches.sentinel.loss(loss)
            return
        found = measure(loss) if self._host.again is None else None
        if found is not None and found.kind is not None:
            event = self._host.event("loss", "", "loss", found.kind, loss.dtype)
            self._host.publish(self._ledger.bad_loss(event.explained(self._outside.origin(loss))))
        elif found is not None:
            self._outside.watch(loss)

    def bad_gradient(self, module: str, tensor: str, found: Range, dtype: torch.dtype, largest: float) -> None:
        """The first bad gradient of this backward, where modules are framed."""
        kind = found.kind or ""
        event = self._host.event("backward", module, tensor, kind, dtype)
        self._gradient = event.explained(explain_gradient(kind, dtype, largest))
        if self._engine is None:
            torch.autograd.Variable._execution_engine.queue_callback(self.after_backward)

    def after_backward(self) -> None:
        """Judge a micro-step of framed modules."""
        if self.watches.forward is None or self.watches.sentinel is not None:
            return
        self.watches.forward.output_bad = False
        gradient, self._gradient = self._gradient, None
        made = self._outside.derivative()
        if gradient is not None and made is not None:
            gradient = replace(gradient, origin=replace(gradient.origin, op=made[0], line=made[1]))
        self._outside.forget()
        measured = self.watches.measured
        self.gradients.largest = max(self.gradients.largest, measured.largest)
        seen = measured.seen
        measured.reset()
        self._judge_gradients(seen, gradient, searching=self.searching())

    def searching(self) -> bool:
        """Whether bad gradients may be a loss scale that is being searched.

        Without an engine a scaler of the script's own cannot be seen, so fp16 gradients alone prove nothing.
        """
        if self._engine is not None:
            return engines.loss_scale(self._engine).searching
        return self._low_precision or any(p.dtype is torch.float16 for p in self._model.parameters())

    def read(self) -> None:
        """Read at once what the sentinel recorded, and judge it."""
        if self.watches.sentinel is not None:
            self.watches.sentinel.start_reading()
            self.judge_readings(searching=self.searching())

    def judge_readings(self, *, searching: bool) -> None:
        """Go through what the sentinel recorded since the last step as if it had been seen when it happened."""
        sentinel = self.watches.sentinel
        if sentinel is None:
            return
        readings = sentinel.finish_reading()
        silent = sentinel.silence()
        if silent is not None:
            self._host.warn(silent)
        for story in stories(readings, self._host.clock.step):
            if self._host.first_bad is not None:
                return
            self._judge_story(story, searching=searching)

    def _judge_story(self, story: Story, *, searching: bool) -> None:
        for event in story.suspicions:
            if "nan" in event.kind:
                self._ledger.became_nan(f"{event.module}: {event.tensor}".removeprefix(": "))
            if not self._ledger.is_harmless(event.place):
                self._ledger.suspect(event)
        if story.loss is not None:
            self._host.publish(self._ledger.bad_loss(story.loss))
        elif story.output_bad and not story.gradients:
            self._host.publish(self._ledger.earliest())
        self._judge_gradients(story.gradients, story.gradient, searching=searching)

    def _judge_gradients(self, seen: int, gradient: Event | None, *, searching: bool) -> None:
        self.gradients.seen += seen
        if gradient is not None:
            self.gradients.clean = False
            self._host.publish(self._ledger.bad_gradient(gradient, searching=searching))
        elif seen:
            self._ledger.backward_went_well()

    def close(self) -> None:
        """The run is over: what it stopped on may still be undecided."""
        self._outside.stop()
        self.read()
        forward, loss = self.watches.forward, self._outside.unjudged()
        if forward is not None and forward.output_bad:
            self._host.publish(self._ledger.earliest())
        if loss is not None:
            self.loss(loss)


def around_backward(judge: Judge, clock: Clock, guarded: Callable[..., Any]) -> Callable[..., Any]:
    """What wraps an engine's `backward`: it looks at the loss before, and at the gradients after."""

    def around(original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        loss = args[0] if args else kwargs.get("loss")
        if isinstance(loss, Tensor):
            guarded(judge.loss, loss)
        try:
            return original(*args, **kwargs)
        finally:
            guarded(judge.after_backward)
            clock.backwards += 1

    return around
