"""The detector: watches an engine or a module for the first non-finite value. Runs in rank processes only.

The detector keeps the time (optimizer step, micro-step), hears from the module hooks, the gradient hooks and the
engine's own backward and step, and lets the ledger judge. It never communicates in the training thread, never changes a
value, and a failure of its own never reaches the user's code: it is kept in `problems`.

Two watches feed it. `ForwardWatch` frames every module and measures at once; `Sentinel` records the blocks' tensors on
the device, and what it recorded is judged once per optimizer step.
"""

from __future__ import annotations

import atexit
import functools
import weakref
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Literal

import torch

from dsdoctor.finding import FirstBad, Phase
from dsdoctor.numerics import engines
from dsdoctor.numerics.announcing import Announcer
from dsdoctor.numerics.batches import Batches, Call
from dsdoctor.numerics.clock import Clock
from dsdoctor.numerics.events import Event
from dsdoctor.numerics.frames import FrameLog, batch_text
from dsdoctor.numerics.headroom import Recorder
from dsdoctor.numerics.hooks import BatchLimitReached
from dsdoctor.numerics.judging import Judge, around_backward
from dsdoctor.numerics.ledger import Ledger
from dsdoctor.numerics.optimizers import OptimizerSteps
from dsdoctor.numerics.publishing import OnFirstBad, Publisher, SecondLook
from dsdoctor.numerics.recording import Recording
from dsdoctor.numerics.stats import type_name
from dsdoctor.numerics.steps import Before, Gradients, StepJudge, look_at_weights
from dsdoctor.numerics.watchdog import Watchdog
from dsdoctor.numerics.watches import Watches
from dsdoctor.numerics.weights import WeightWatch
from dsdoctor.numerics.wrapping import Around, Wrapped

_COMPILED = (
    'compiled code runs without the hooks that frame modules: attach with mode="sentinel", before the first compiled '
    "call, or to the model as it is without torch.compile"
)
Mode = Literal["auto", "sentinel", "frames"]
_PROBLEMS = 20
"""Failures of our own after which a detector falls silent."""


class Detector:
    """Watches one engine or module until `detach`. Made by `attach`; a context manager.

    `first_bad` is the first non-finite value once it is certain, `again` the same trouble seen in later batches with a
    frame for every module (where the first sight had none), `warnings` what else the user should know, `problems` are
    failures of the detector itself. `headroom` has the largest values of the last steps; that they near the limit of
    fp16 is a warning.
    """

    def __init__(
        self,
        target: Any,
        *,
        max_frames: int,
        trace_batches: Collection[int],
        abort_after_batch: int | None,
        backward: bool,
        mode: Mode,
        on_first_bad: OnFirstBad | None,
        out: str | None,
        record: str | None,
    ) -> None:
        self.problems: list[str] = []
        self.warnings: list[str] = []
        self.headroom = Recorder()
        self.clock = Clock()
        recording = Recording(Path(record), self.clock, self.problem, backward=backward) if record is not None else None
        self._model = model = engines.user_model(target)
        self._engine = engine = target if engines.is_engine(target) else None
        self.clock.by_forwards = engine is None or engines.is_pipeline(engine)
        self._abort_after_batch = abort_after_batch
        self._mode = mode
        self._frames = FrameLog(max_frames)
        self._ledger = Ledger()
        self._weights = WeightWatch()
        self._announcer = Announcer(out)
        self._publisher = Publisher(model, self._weights, self._announcer, on_first_bad, self.problem)
        self._second_look = SecondLook(model, self._weights, self.event, max_frames, replays=mode == "auto")
        self._watchdog = Watchdog(model, self.warn)
        self._judge = Judge(engine, model, self, self._ledger)
        self._steps = StepJudge(engine, model, self, self._ledger)
        self._batches = Batches(model, self)
        self._watches = self._judge.watches = Watches(
            model,
            self,
            self._batches,
            self._ledger,
            self._frames,
            self._weights,
            backward=backward,
            traced=trace_batches,
            bad_gradient=self._judge.bad_gradient,
        )
        self._wrapped = Wrapped(engine, **self._arounds())
        self._optimizers = None if engine is not None else OptimizerSteps(model, self)
        if mode == "frames":
            self._watches.use_frames()
        else:
            self._watches.use_sentinel()
        self._watches.arrange_trace(0)
        if recording is not None:
            self._watches.record(recording, target)
        self._framed = mode == "frames"
        self._attached = True
        if self._framed and engines.has_compiled_parts(target):
            self.warn(_COMPILED)
        self._at_exit = functools.partial(_detach, weakref.ref(self))
        atexit.register(self._at_exit)

    @property
    def first_bad(self) -> FirstBad | None:
        """The first non-finite value of this rank, once it is certain."""
        return self._publisher.first_bad

    @property
    def again(self) -> FirstBad | None:
        """The sight of which there are frames: the first one, or the same trouble in a later batch."""
        return self._publisher.again

    # ------------------------------------------------------------------ life

    def detach(self) -> None:
        """Judge what is still open, then remove every hook and wrapper. A second call does nothing."""
        if not self._attached:
            return
        self._guarded(self._judge.close)
        self._attached = False
        atexit.unregister(self._at_exit)
        self._watches.detach()
        self._batches.detach()
        if self._optimizers is not None:
            self._optimizers.detach()
        self._wrapped.undo()
        self._second_look.forget()
        self._announcer.finish()

    def __enter__(self) -> Detector:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def problem(self, error: Exception) -> None:
        """Keep a failure of our own; too many silence the detector."""
        self.problems.append(f"{type(error).__name__}: {error}")
        if len(self.problems) >= _PROBLEMS:
            self._watches.fall_silent()

    def warn(self, text: str) -> None:
        """Tell the user something that is no non-finite value, once."""
        if text not in self.warnings:
            self.warnings.append(text)
            self._announcer.warning(text)

    # ------------------------------------------------------------------ what was found

    def event(self, phase: Phase, module: str, tensor: str, kind: str, dtype: torch.dtype) -> Event:
        """A suspicion at this moment of the run."""
        return Event(
            step=self.clock.step,
            micro_step=self.clock.micro_step,
            phase=phase,
            module=module,
            tensor=tensor,
            kind=kind,
            dtype=type_name(dtype),
            batch=self.clock.batch,
            frames=self._frames.last(),
            order=self._frames.taken,
        )

    def publish(self, event: Event | None) -> None:
        """Report a value that is certain; what the sentinel saw is looked at once more."""
        if event is None or self.again is not None:
            return
        seen_by_sentinel = self._watches.sentinel is not None and self.first_bad is None
        if seen_by_sentinel:
            event = self._guarded(self._second_look.at, event) or event
        self._publisher.publish(event)
        if self.again is not None or self._mode == "sentinel":
            self._watches.fall_silent()
        elif seen_by_sentinel and self._attached:
            self._ledger.reset()
            self._watches.use_frames()

    # ------------------------------------------------------------------ batches

    def batch_begins(self, *, training: bool, call: Call | None) -> None:
        """A batch begins: judge the one before it, if it had no backward of an engine to do so."""
        if training:
            self._judge.batch_begins()
            if self._engine is None and self.clock.batch >= 0 and not self._optimizers_known():
                self._judge.read()
                self._next_step()
            self.clock.forwards += 1
        self.clock.batch += 1
        self._watches.batch_begins(training=training)
        if call is None:
            self._watches.arrange_trace(self.clock.batch)
        if training and call is not None and self._watches.sentinel is not None:
            self._second_look.keep(self.clock.batch, self.clock.micro_step, call)

    def batch_ended(self, output: Any, *, raised: bool) -> None:
        """The root's forward ended. A bad loss among its outputs decides at once.

        Raises:
            BatchLimitReached: this was the last batch to run.
        """
        self._judge.batch_ended(raised=raised)
        traced = self._frames.end_trace()
        if traced is not None:
            self._announcer.trace(batch_text(traced, self.clock.batch))
        self._watches.arrange_trace(self.clock.batch + 1)
        if self._abort_after_batch is not None and self.clock.batch >= self._abort_after_batch:
            raise BatchLimitReached(f"stopped after batch {self.clock.batch} as abort_after_batch asks")

    def frame_taken(self) -> None:
        """A module's call was framed."""
        self.headroom.hear(self._frames.last()[-1], self.clock.step)

    # ------------------------------------------------------------------ optimizer step

    def _arounds(self) -> dict[str, Around]:
        if engines.is_pipeline(self._engine):
            return {"_take_model_step": self._around_step}
        return {
            "backward": around_backward(self._judge, self.clock, self._guarded),
            "step": self._around_step,
        }

    def _around_step(self, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        before = self._guarded(self._before_step)
        try:
            result = original(*args, **kwargs)
        except BaseException:
            if before is not None:
                self._guarded(self._step_raised, before)
            raise
        if before is not None:
            self._guarded(self._after_step, before)
        return result

    def _before_step(self) -> Before:
        if self._watches.measured.seen:
            self._judge.after_backward()
        loss = engines.pipeline_loss(self._engine)
        if loss is not None:
            self._judge.loss(loss)
        sentinel = self._watches.sentinel
        before = self._steps.before(self._judge.gradients, thorough=sentinel is None)
        if before.boundary:
            if sentinel is not None:
                sentinel.start_reading(trained=self.first_bad is None)
                if not engines.checks_gradients(self._engine):
                    self._judge_readings(before)
            self._watchdog.before_step()
        return before

    def _step_raised(self, before: Before) -> None:
        """The call raised: after the step (an observer that ends the run), or for want of a lower loss scale."""
        if engines.steps_taken(self._engine) != before.taken:
            self._after_step(before)
            return
        if before.boundary:
            self._judge_readings(before)
        self._steps.raised(before, self._judge.gradients)

    def _after_step(self, before: Before) -> None:
        if not self._steps.took_step(before):
            self.clock.step_calls += 1
            return
        self._judge_readings(before)
        if self.again is None:
            weights = self._weights if self._watches.forward is not None else None
            self._steps.after(before, self._judge.gradients, weights)
        rate = engines.learning_rate(getattr(self._engine, "optimizer", None))
        self._watchdog.after_step(skipped=self._steps.skipped(before), scale=before.scale.value, rate=rate)
        self._next_step()

    def _judge_readings(self, before: Before) -> None:
        self._judge.judge_readings(searching=before.scale.searching)
        self._second_look.forget()

    def _next_step(self) -> None:
        forecast = self.headroom.forecast() if self.first_bad is None else None
        if forecast is not None:
            self.warn(forecast)
        if self._framed and self._judge.gradients.seen and not self._frames.taken:
            self.warn(_COMPILED)
        self._framed = self._watches.forward is not None
        self._judge.gradients = Gradients()
        self._second_look.forget()
        self._frames.taken = 0
        self.clock.stepped()

    # ------------------------------------------------------------------ without an engine

    def _optimizers_known(self) -> bool:
        return self._optimizers is not None and self._optimizers.known

    def before_optimizer(self) -> None:
        """An optimizer is about to change weights of the model."""
        if self._watches.measured.seen:
            self._judge.after_backward()
        self._judge.read()
        self._watchdog.before_step()
        if self._watches.sentinel is not None:  # a closure may run forward and backward inside the step
            self._watches.sentinel.after_backward = functools.partial(self._guarded, self._judge.read)

    def after_optimizer(self, optimizer: Any, *, first: bool) -> None:
        """An optimizer changed weights of the model. With the first one it is known that batches are no steps."""
        if first:
            self.clock.step = 0
        if self._watches.sentinel is not None:
            self._watches.sentinel.after_backward = None
        if self.again is None:
            self.publish(self._ledger.step_went_well())
            if self._watches.forward is not None:
                look_at_weights(self._model, self, self._weights, optimizer, self._judge.gradients)
        self._watchdog.after_step(skipped=False, scale=1.0, rate=engines.learning_rate(optimizer))
        self._next_step()

    def _guarded(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call one of our own functions inside the user's call; a failure stays ours."""
        if not self._attached:
            return None
        try:
            return function(*args)
        except Exception as error:
            self.problem(error)
            return None


def _detach(detector: weakref.ref[Detector]) -> None:
    """At the end of the process: what a script stopped on may still be undecided."""
    living = detector()
    if living is not None:
        living.detach()
