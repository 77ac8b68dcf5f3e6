"""`attach`: watches an engine or a module for the first non-finite value. Runs in rank processes only.

The detector keeps the time (optimizer step, micro-step), hears from the module hooks, the gradient hooks and the
engine's own backward and step, and lets the ledger judge. It never communicates in the training thread, never changes a
value, and a failure of its own never reaches the user's code: it is kept in `problems`.

Two watches feed it. `Frames` measures every tensor of every module at once; `Sentinel` records the blocks' tensors on
the device, and what it recorded is judged once per optimizer step.
"""

from __future__ import annotations

import atexit
import functools
import weakref
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from dsdoctor.finding import FirstBad, Phase
from dsdoctor.numerics import again, engines
from dsdoctor.numerics.announcing import Announcer
from dsdoctor.numerics.batches import Batches, Call
from dsdoctor.numerics.causes import explain_gradient, explain_loss
from dsdoctor.numerics.clock import Clock
from dsdoctor.numerics.events import Event, Origin
from dsdoctor.numerics.forward import ForwardWatch
from dsdoctor.numerics.frames import FrameLog, batch_text
from dsdoctor.numerics.gradients import GradientWatch, MeasuredGradients
from dsdoctor.numerics.hooks import BatchLimitReached, Hook
from dsdoctor.numerics.ledger import Ledger
from dsdoctor.numerics.optimizers import OptimizerSteps
from dsdoctor.numerics.patch import fp32_patch
from dsdoctor.numerics.readings import stories
from dsdoctor.numerics.replay import NotReplayable
from dsdoctor.numerics.report import hit_report
from dsdoctor.numerics.sentinel import Sentinel
from dsdoctor.numerics.stats import Range, measure
from dsdoctor.numerics.steps import Before, Gradients, StepJudge, look_at_old_weights, look_at_weights
from dsdoctor.numerics.watchdog import Watchdog
from dsdoctor.numerics.weights import WeightWatch
from dsdoctor.numerics.wrapping import Around, Wrapped

Mode = Literal["auto", "sentinel", "frames"]
OnFirstBad = Callable[[FirstBad, str, str], None]
_PROBLEMS = 20
"""Failures of our own after which a detector falls silent."""
_KEPT_BATCHES = 64
"""Batches of one optimizer step whose inputs are remembered for a second run."""
_NOT_AGAIN = Origin(cause="not-reproducible", detail="a second run of the batch's forward was finite")


class Detector:
    """Watches one engine or module until `detach`. Made by `attach`; a context manager.

    `first_bad` is the first non-finite value once it is certain, `again` the same trouble seen in later batches with a
    frame for every module (where the first sight had none), `warnings` what else the user should know, `problems` are
    failures of the detector itself.
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
    ) -> None:
        self.first_bad: FirstBad | None = None
        self.again: FirstBad | None = None
        self.problems: list[str] = []
        self.warnings: list[str] = []
        self._model = engines.user_model(target)
        self._engine = target if engines.is_engine(target) else None
        self._announcer = Announcer(out)
        self._on_first_bad = on_first_bad
        self._trace_batches = frozenset(trace_batches)
        self._abort_after_batch = abort_after_batch
        self._backward = backward
        self._mode = mode
        self.clock = Clock(by_forwards=self._engine is None or engines.is_pipeline(self._engine))
        self._frames = FrameLog(max_frames)
        self._ledger = Ledger()
        self._class_names = {name: type(module).__name__ for name, module in self._model.named_modules()}
        self._weights = WeightWatch({id(p): name for name, p in self._model.named_parameters()})
        self._watchdog = Watchdog(self._model, self.warn)
        self._gradient: Event | None = None
        self._kept: list[again.Batch] = []
        self._low_precision = False
        self._rank = engines.rank()
        self._batches = Batches(self._model, self)
        self._sentinel: Sentinel | None = None
        self._forward: ForwardWatch | None = None
        self._gradients: GradientWatch | None = None
        self._measured = MeasuredGradients(self._bad_gradient)
        self._steps = StepJudge(self._engine, self._model, self, self._ledger)
        self._wrapped = Wrapped(self._engine, **self._arounds())
        self._optimizers = None if self._engine is not None else OptimizerSteps(self._model, self)
        if mode == "frames":
            self._use_frames()
        else:
            self._use_sentinel()
        self._arrange_trace()
        self._attached = True
        self._at_exit = functools.partial(_detach, weakref.ref(self))
        atexit.register(self._at_exit)

    # ------------------------------------------------------------------ life

    def detach(self) -> None:
        """Judge what is still open, then remove every hook and wrapper. A second call does nothing."""
        if not self._attached:
            return
        self._guarded(self._close)
        self._attached = False
        atexit.unregister(self._at_exit)
        for watch in (self._sentinel, self._forward, self._gradients, self._batches, self._optimizers):
            if watch is not None:
                watch.detach()
        self._wrapped.undo()
        self._kept.clear()
        self._announcer.finish()

    def __enter__(self) -> Detector:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def problem(self, error: Exception) -> None:
        """Keep a failure of our own; too many silence the detector."""
        self.problems.append(f"{type(error).__name__}: {error}")
        if len(self.problems) >= _PROBLEMS:
            self._fall_silent()

    def warn(self, text: str) -> None:
        """Tell the user something that is no non-finite value, once."""
        if text not in self.warnings:
            self.warnings.append(text)
            self._announcer.warning(text)

    def _close(self) -> None:
        if self._sentinel is not None:
            self._sentinel.start_reading()
            self._judge_readings(searching=self._searching())
        elif self._forward is not None and self._forward.output_bad:
            self.publish(self._ledger.earliest())

    def _use_sentinel(self) -> None:
        self._sentinel = Sentinel(self._model, self, self._batches, backward=self._backward)
        self._weights.start(self._model)

    def _use_frames(self) -> None:
        if self._sentinel is not None:
            self._sentinel.detach()
            self._sentinel = None
        if self._backward:
            self._gradients = GradientWatch(self._measured.look, self.problem)
        self._forward = self._forward_watch(self._gradients, suspecting=True)

    def _forward_watch(self, gradients: GradientWatch | None, *, suspecting: bool) -> ForwardWatch:
        return ForwardWatch(
            self._model,
            self,
            self._batches,
            self._ledger,
            self._frames,
            gradients,
            self._weights,
            suspecting=suspecting,
        )

    def _fall_silent(self) -> None:
        if self._forward is not None:
            self._forward.suspecting = False
        if self._gradients is not None:
            self._gradients.detach()

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
            dtype=str(dtype).removeprefix("torch."),
            batch=self.clock.batch,
            frames=self._frames.last(),
            order=self._frames.taken,
        )

    def publish(self, event: Event | None) -> None:
        """Report the first bad value, once; and once more where the first report had no frames."""
        if event is None or self.again is not None:
            return
        first = self.first_bad is None
        if not first and not event.frames:
            return
        if first and self._sentinel is not None:
            event = self._looked_into(event)
        event = self._with_growth(event)
        rank = engines.rank() or self._rank
        found = event.first_bad(rank)
        report, patch = hit_report(event, rank), fp32_patch(event, self._class_names.get(event.module, ""))
        if first:
            self.first_bad = found
        if not first or event.frames:
            self.again = found
            self._fall_silent()
        try:
            if not first:
                self._announcer.again(report, patch)
            elif self._on_first_bad is not None:
                self._on_first_bad(found, report, patch)
            else:
                self._announcer.first_bad(found, report, patch, order=event.order)
        except Exception as error:
            self.problem(error)

    def _looked_into(self, event: Event) -> Event:
        """What weights and a second run of the batch tell of a value that the sentinel saw."""
        event = look_at_old_weights(self._model, self._weights, event) or event
        if self._mode == "auto" and event.phase in ("input", "parameter", "forward", "loss"):
            event = self._framed(event)
        if self._mode == "auto" and not event.frames:
            self._ledger.reset()
            self._use_frames()
        return event

    def _framed(self, event: Event) -> Event:
        batch = next((b for b in self._kept if b.number == event.batch), None)
        if batch is None:
            return event
        try:
            found = again.framed(self._model, batch, self.event, self._frames.limit)
        except NotReplayable as reason:
            return event.explained(replace(event.origin, detail=f"the batch was not run again: {reason}"))
        except Exception as error:
            self.problem(error)
            return event
        if found is None:
            return event if event.phase == "loss" else event.explained(_NOT_AGAIN)
        return replace(found, step=event.step)

    def _with_growth(self, event: Event) -> Event:
        """An overflow of weights that grew out of all bounds since the first step is the weights' doing."""
        growth = self._weights.growth()
        from_values = event.origin.cause in ("overflow", "inf-minus-inf", "unknown")
        if growth is None or event.phase not in ("forward", "loss") or not from_values:
            return event
        detail = f"the largest weight is {growth:.3g} times what it was in the first step; {event.origin.detail}"
        return event.explained(replace(event.origin, cause="exploded-weights", detail=detail.rstrip("; ")))

    # ------------------------------------------------------------------ batches

    def batch_begins(self, *, training: bool, call: Call | None) -> None:
        """A batch begins: judge the one before it, if it had no backward of an engine to do so."""
        if training:
            if self._forward is not None and self.again is None:
                self._judge_last_batch(self._forward)
            if self._engine is None and self.clock.batch >= 0 and not self._optimizers_known():
                self._plain_step()
            if self._sentinel is not None and self._sentinel.is_filling_up:
                self._sentinel.start_reading()
                self._judge_readings(searching=self._searching())
            autocast = engines.autocast_in_force()
            self._low_precision |= autocast is not None and autocast[1] is torch.float16
            self.clock.forwards += 1
        if self._forward is not None:
            self._forward.reset()
        if self._sentinel is not None:
            self._sentinel.reset(training=training)
        self.clock.batch += 1
        if call is None:
            self._arrange_trace(self.clock.batch)
        undecided = self._mode == "auto" and self.first_bad is None and len(self._kept) < _KEPT_BATCHES
        if undecided and training and call is not None:
            self._kept.append(again.Batch.now(self.clock.batch, self.clock.micro_step, *call))

    def _judge_last_batch(self, forward: ForwardWatch) -> None:
        if self._measured.seen:
            self._after_backward()
        if forward.output_bad:
            self.publish(self._ledger.earliest())

    def batch_ended(self, output: Any, *, raised: bool) -> None:
        """The root's forward ended. A bad loss among its outputs decides at once.

        Raises:
            BatchLimitReached: this was the last batch to run.
        """
        forward = self._forward
        if forward is not None and forward.suspecting:
            forward.output_bad |= raised and torch.is_grad_enabled()
            if forward.loss_bad:
                self.publish(self._ledger.earliest())
        traced = self._frames.end_trace()
        if traced is not None:
            self._announcer.trace(batch_text(traced, self.clock.batch))
        self._arrange_trace(self.clock.batch + 1)
        if self._abort_after_batch is not None and self.clock.batch >= self._abort_after_batch:
            raise BatchLimitReached(f"stopped after batch {self.clock.batch} as abort_after_batch asks")

    def _arrange_trace(self, batch: int = 0) -> None:
        """Take frames of that batch if it is to be traced."""
        traced = batch in self._trace_batches
        if traced:
            self._frames.start_trace()
        if self._sentinel is None:
            return
        if traced and self._forward is None:
            self._forward = self._forward_watch(None, suspecting=False)
        elif not traced and self._forward is not None:
            self._forward.detach()
            self._forward = None

    def frame_taken(self) -> None:
        """A module's call was framed."""

    # ------------------------------------------------------------------ backward

    def _bad_gradient(self, module: str, tensor: str, found: Range, dtype: torch.dtype, largest: float) -> None:
        """The first bad gradient of this backward."""
        kind = found.kind or ""
        event = self.event("backward", module, tensor, kind, dtype)
        self._gradient = event.explained(explain_gradient(kind, dtype, largest))
        if self._engine is None:
            torch.autograd.Variable._execution_engine.queue_callback(self._after_backward)

    def _around_backward(self, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        loss = args[0] if args else kwargs.get("loss")
        if isinstance(loss, Tensor):
            self._guarded(self._look_at_loss, loss)
        try:
            return original(*args, **kwargs)
        finally:
            if self._forward is not None:
                self._guarded(self._after_backward)
            self.clock.backwards += 1

    def _look_at_loss(self, loss: Tensor) -> None:
        if self._sentinel is not None:
            self._sentinel.loss(loss)
            return
        found = measure(loss) if self.again is None else None
        if found is not None and found.kind is not None:
            event = self.event("loss", "", "loss", found.kind, loss.dtype)
            self.publish(self._ledger.bad_loss(event.explained(explain_loss(loss))))

    def _after_backward(self) -> None:
        """Judge what the micro-step's forward left open by what its gradients turned out to be."""
        if self._sentinel is not None:
            return
        if self._forward is not None:
            self._forward.output_bad = False
        gradient, self._gradient = self._gradient, None
        seen = self._measured.seen
        self._steps.gradients.largest = max(self._steps.gradients.largest, self._measured.largest)
        self._measured.reset()
        self._judge_gradients(seen, gradient, searching=self._searching())

    def _judge_gradients(self, seen: int, gradient: Event | None, *, searching: bool) -> None:
        self._steps.gradients.seen += seen
        if gradient is not None:
            self._steps.gradients.clean = False
            self.publish(self._ledger.bad_gradient(gradient, searching=searching))
        elif seen:
            self._ledger.backward_went_well()

    def _searching(self) -> bool:
        """Whether bad gradients may be a loss scale that is being searched.

        Without an engine a scaler of the script's own cannot be seen, so fp16 gradients alone prove nothing.
        """
        if self._engine is not None:
            return engines.loss_scale(self._engine).searching
        half = any(p.dtype is torch.float16 for p in self._model.parameters())
        return half or self._low_precision

    # ------------------------------------------------------------------ what the sentinel recorded

    def _judge_readings(self, *, searching: bool) -> None:
        """Go through what was recorded since the last step as if it had been seen when it happened."""
        assert self._sentinel is not None
        silent = self._sentinel.silence()
        if silent is not None:
            self.warn(silent)
        for story in stories(self._sentinel.finish_reading(), self.clock.step):
            if self.first_bad is not None:
                break
            for event in story.suspicions:
                if "nan" in event.kind:
                    self._ledger.became_nan(f"{event.module}: {event.tensor}".removeprefix(": "))
                if not self._ledger.is_harmless(event.place):
                    self._ledger.suspect(event)
            if story.loss is not None:
                self.publish(self._ledger.bad_loss(story.loss))
            elif story.output_bad and not story.gradients:
                self.publish(self._ledger.earliest())
            self._judge_gradients(story.gradients, story.gradient, searching=searching)
        self._kept.clear()

    # ------------------------------------------------------------------ optimizer step

    def _arounds(self) -> dict[str, Around]:
        if engines.is_pipeline(self._engine):
            return {"_take_model_step": self._around_step}
        return {"backward": self._around_backward, "step": self._around_step}

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
        if self._measured.seen:
            self._after_backward()
        loss = engines.pipeline_loss(self._engine)
        if loss is not None:
            self._look_at_loss(loss)
        before = self._steps.before(thorough=self._sentinel is None)
        if before.boundary:
            if self._sentinel is not None:
                self._sentinel.start_reading()
                if not engines.checks_gradients(self._engine):
                    self._judge_readings(searching=before.scale.searching)
            self._watchdog.before_step()
        return before

    def _step_raised(self, before: Before) -> None:
        """The call raised: after the step (an observer that ends the run), or for want of a lower loss scale."""
        if engines.steps_taken(self._engine) != before.taken:
            self._after_step(before)
            return
        if self._sentinel is not None and before.boundary:
            self._judge_readings(searching=before.scale.searching)
        self._steps.raised(before)

    def _after_step(self, before: Before) -> None:
        if not self._steps.took_step(before):
            self.clock.step_calls += 1
            return
        if self._sentinel is not None:
            self._judge_readings(searching=before.scale.searching)
        if self.again is None:
            self._steps.after(before, self._weights if self._forward is not None else None)
        self._watchdog.after_step(skipped=self._steps.skipped(before), scale=before.scale.value)
        self._next_step()

    def _next_step(self) -> None:
        self._steps.gradients = Gradients()
        self.clock.stepped()

    # ------------------------------------------------------------------ without an engine

    def _optimizers_known(self) -> bool:
        return self._optimizers is not None and self._optimizers.known

    def _plain_step(self) -> None:
        """Without an engine: all gradients of a step are there (its optimizer comes, or the next batch begins)."""
        if self._sentinel is not None:
            self._sentinel.start_reading()
            self._judge_readings(searching=self._searching())
        self._next_step()

    def before_optimizer(self) -> None:
        """An optimizer is about to change weights of the model."""
        if self._measured.seen:
            self._after_backward()
        if self._sentinel is not None:
            self._sentinel.start_reading()
            self._judge_readings(searching=self._searching())
        self._watchdog.before_step()

    def after_optimizer(self, optimizer: Any, *, first: bool) -> None:
        """An optimizer changed weights of the model. With the first one it is known that batches are no steps."""
        if first:
            self.clock.step = 0
        if self.again is None:
            self.publish(self._ledger.step_went_well())
            if self._forward is not None:
                look_at_weights(self._model, self, self._weights, optimizer, self._steps.gradients)
        self._watchdog.after_step(skipped=False, scale=1.0)
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


def attach(
    engine_or_model: Any,
    *,
    max_frames: int = 21,
    trace_batches: Collection[int] = (),
    abort_after_batch: int | None = None,
    backward: bool = True,
    mode: Mode = "auto",
    on_first_bad: OnFirstBad | None = None,
    out: str | None = None,
) -> Detector:
    """Watch a DeepSpeed engine (or one that behaves like it) or a module for the first non-finite value.

    `max_frames` module calls are kept for the report; the batches numbered in `trace_batches` (from 0) are printed in
    full on stderr; after batch `abort_after_batch` a `BatchLimitReached` is raised. `backward` watches gradients too.

    `mode="frames"` measures every weight, input and output of every module. `"sentinel"` records the outputs of the
    blocks and all gradients on their device and looks at them once per optimizer step: cheap enough to leave on, but
    the report names a block. `"auto"` is the sentinel until a hit; then the batch's forward is run again with frames,
    or, where that cannot be done, the next batches are framed.

    `on_first_bad` is called once on this rank with the finding, the report and the patch ("" where none helps). Without
    it the ranks agree over their store who was first; that rank prints report and patch on stderr, the others write
    theirs into `out` (a folder in the system's temp folder by default). The run goes on either way. Without an engine a
    step is what an optimizer of the model's weights does, or each batch where none is seen.

    Raises:
        TypeError: not an engine or module, or `nn.DataParallel` is in it.
        ValueError: an unknown mode, or the model is watched already.
    """
    if mode not in ("auto", "sentinel", "frames"):
        raise ValueError(f"mode is auto, sentinel or frames, not {mode!r}")
    if max_frames < 1:
        raise ValueError("max_frames counts the module calls to keep and is at least 1")
    hooks = engines.user_model(engine_or_model)._forward_pre_hooks.values()
    if any(isinstance(hook, Hook) and hook.live for hook in hooks):
        raise ValueError("this model has a detector already; detach that one first")
    return Detector(
        engine_or_model,
        max_frames=max_frames,
        trace_batches=trace_batches,
        abort_after_batch=abort_after_batch,
        backward=backward,
        mode=mode,
        on_first_bad=on_first_bad,
        out=out,
    )


def _detach(detector: weakref.ref[Detector]) -> None:
    """At the end of the process: what a script stopped on may still be undecided."""
    living = detector()
    if living is not None:
        living.detach()
