"""`attach`: watches an engine or a module for the first non-finite value. Runs in rank processes only.

The detector keeps the time (optimizer step, micro-step), hears from the module hooks, the gradient hooks and the
engine's own backward and step, and lets the ledger judge. It never communicates, never changes a value, and a failure
of its own never reaches the user's code: it is kept in `problems`.
"""

from __future__ import annotations

import atexit
import functools
import sys
import weakref
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from dsdoctor.finding import FirstBad, Phase
from dsdoctor.numerics import engines
from dsdoctor.numerics.causes import explain_gradient, explain_loss
from dsdoctor.numerics.engines import Scale
from dsdoctor.numerics.events import Event, Origin
from dsdoctor.numerics.forward import ForwardWatch
from dsdoctor.numerics.frames import FrameLog, batch_text
from dsdoctor.numerics.gradients import GradientWatch
from dsdoctor.numerics.hooks import BatchLimitReached, Hook
from dsdoctor.numerics.ledger import Ledger
from dsdoctor.numerics.patch import fp32_patch
from dsdoctor.numerics.report import hit_report
from dsdoctor.numerics.stats import Range, measure
from dsdoctor.numerics.wrapping import Wrapped

Mode = Literal["auto", "sentinel", "frames"]
OnFirstBad = Callable[[FirstBad, str, str], None]
_PROBLEMS = 20
"""Failures of our own after which a detector falls silent."""


@dataclass(slots=True)
class _Clock:
    """Where the run is. `batch` is the number of the last root forward that began, from 0."""

    step: int = 0
    backwards: int = 0
    step_calls: int = 0
    batch: int = -1

    @property
    def micro_step(self) -> int:
        return max(self.backwards, self.step_calls)

    def stepped(self) -> None:
        self.step += 1
        self.backwards = self.step_calls = 0


@dataclass(frozen=True, kw_only=True)
class _BeforeStep:
    """What an engine said before an optimizer step, to compare with afterwards. `reduced` is a bad reduced gradient."""

    boundary: bool
    taken: int | None
    skipped: int
    scale: Scale
    reduced: tuple[str, str, str, torch.dtype] | None


class Detector:
    """Watches one engine or module until `detach`. Made by `attach`; a context manager.

    `first_bad` is the first non-finite value once it is certain, `problems` are failures of the detector itself.
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
    ) -> None:
        self.first_bad: FirstBad | None = None
        self.problems: list[str] = []
        self._model = engines.user_model(target)
        self._engine = target if engines.is_engine(target) else None
        self._on_first_bad = on_first_bad or _print_report
        self._trace_batches = frozenset(trace_batches)
        self._abort_after_batch = abort_after_batch
        self._clock = _Clock()
        self._frames = FrameLog(max_frames)
        self._ledger = Ledger()
        self._gradients = GradientWatch(self._bad_gradient, self.problem) if backward else None
        self._full = mode != "sentinel"
        self._forward = ForwardWatch(self._model, self, self._ledger, self._frames, self._gradients, self._full)
        self._class_names = {name: type(module).__name__ for name, module in self._model.named_modules()}
        self._parameter_names = {id(p): name for name, p in self._model.named_parameters()}
        self._gradient: Event | None = None
        self._gradients_seen = 0
        self._gradients_clean = True
        self._output_bad = False
        self._low_precision = False
        self._wrapped = Wrapped(self._engine, backward=self._around_backward, step=self._around_step)
        self._rank = engines.rank()
        self._attached = True
        self._at_exit = functools.partial(_detach, weakref.ref(self))
        atexit.register(self._at_exit)

    # ------------------------------------------------------------------ life

    def detach(self) -> None:
        """Judge what is still open, then remove every hook and wrapper. A second call does nothing."""
        if not self._attached:
            return
        self._attached = False
        atexit.unregister(self._at_exit)
        if self._output_bad:
            self._publish(self._ledger.earliest())
        self._forward.detach()
        if self._gradients is not None:
            self._gradients.detach()
        self._wrapped.undo()

    def __enter__(self) -> Detector:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def problem(self, error: Exception) -> None:
        """Keep a failure of our own; too many silence the detector."""
        self.problems.append(f"{type(error).__name__}: {error}")
        if len(self.problems) >= _PROBLEMS:
            self._forward.suspecting = False

    def _publish(self, event: Event | None) -> None:
        """Report the first bad value, once."""
        if event is None or self.first_bad is not None:
            return
        event = self._with_growth(event)
        rank = engines.rank() or self._rank
        self.first_bad = event.first_bad(rank)
        self._forward.suspecting = False
        patch = fp32_patch(event, self._class_names.get(event.module, ""))
        try:
            self._on_first_bad(self.first_bad, hit_report(event, rank), patch)
        except Exception as error:
            self.problem(error)

    def _with_growth(self, event: Event) -> Event:
        """An overflow of weights that grew out of all bounds since the first step is the weights' doing."""
        growth = self._forward.weights.growth()
        from_values = event.origin.cause in ("overflow", "inf-minus-inf", "unknown")
        if growth is None or event.phase not in ("forward", "loss") or not from_values:
            return event
        detail = f"the largest weight is {growth:.3g} times what it was in the first step; {event.origin.detail}"
        return event.explained(replace(event.origin, cause="exploded-weights", detail=detail.rstrip("; ")))

    # ------------------------------------------------------------------ what the module hooks tell

    def event(self, phase: Phase, module: str, tensor: str, kind: str, dtype: torch.dtype) -> Event:
        """A suspicion at this moment of the run."""
        return Event(
            step=self._clock.step,
            micro_step=self._clock.micro_step,
            phase=phase,
            module=module,
            tensor=tensor,
            kind=kind,
            dtype=str(dtype).removeprefix("torch."),
            batch=self._clock.batch,
            frames=self._frames.last(),
        )

    def batch_begins(self, *, training: bool) -> None:
        """The root's forward begins: judge the batch before it, if it had no backward of an engine to do so."""
        if training and self.first_bad is None:
            if self._gradients is not None and self._gradients.seen:
                self._after_backward()
            if self._output_bad:
                self._publish(self._ledger.earliest())
            if self._engine is None and self._clock.batch >= 0:
                self._clock.stepped()
            self._low_precision = torch.is_autocast_enabled() or self._low_precision
        self._output_bad = False
        self._clock.batch += 1
        if self._clock.batch in self._trace_batches:
            self._forward.full = True
            self._frames.start_trace()

    def batch_ended(self, *, bad_output: bool, bad_loss: bool, raised: bool) -> None:
        """The root's forward ended. A bad loss among its outputs decides at once.

        Raises:
            BatchLimitReached: this was the last batch to run.
        """
        self._output_bad = bad_output or raised
        if bad_loss:
            self._publish(self._ledger.earliest())
        traced = self._frames.end_trace()
        if traced is not None:
            print(batch_text(traced, self._clock.batch), file=sys.stderr, flush=True)
            self._forward.full = self._full
        if self._abort_after_batch is not None and self._clock.batch >= self._abort_after_batch:
            raise BatchLimitReached(f"stopped after batch {self._clock.batch} as abort_after_batch asks")

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
        if isinstance(loss, Tensor) and self.first_bad is None:
            self._guarded(self._look_at_loss, loss)
        try:
            return original(*args, **kwargs)
        finally:
            self._guarded(self._after_backward)
            self._clock.backwards += 1

    def _look_at_loss(self, loss: Tensor) -> None:
        found = measure(loss)
        if found is not None and found.kind is not None:
            event = self.event("loss", "", "loss", found.kind, loss.dtype)
            self._publish(self._ledger.bad_loss(event.explained(explain_loss(loss))))

    def _after_backward(self) -> None:
        """Judge what the micro-step's forward left open by what its gradients turned out to be."""
        self._output_bad = False
        gradient, self._gradient = self._gradient, None
        seen = self._gradients.seen if self._gradients is not None else 0
        self._gradients_seen += seen
        if self._gradients is not None:
            self._gradients.reset()
        if gradient is not None:
            self._gradients_clean = False
            self._publish(self._ledger.bad_gradient(gradient, searching=self._searching()))
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

    # ------------------------------------------------------------------ optimizer step

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

    def _before_step(self) -> _BeforeStep:
        engine = self._engine
        assert engine is not None
        if self._gradients is not None and self._gradients.seen:
            self._after_backward()
        boundary = bool(engine.is_gradient_accumulation_boundary())
        look = boundary and self._full and self._gradients_seen and self._gradients_clean and self.first_bad is None
        return _BeforeStep(
            boundary=boundary,
            taken=engines.steps_taken(engine),
            skipped=engines.skipped_steps(engine),
            scale=engines.loss_scale(engine),
            reduced=self._bad_reduced() if look else None,
        )

    def _bad_reduced(self) -> tuple[str, str, str, torch.dtype] | None:
        for parameter, gradient in engines.reduced_gradients(self._engine):
            found = measure(gradient)
            if found is not None and found.kind is not None:
                name = self._parameter_names.get(id(parameter), "")
                module, _, label = name.rpartition(".")
                return module, f"{label}.grad" if label else "gradients", found.kind, gradient.dtype
        return None

    def _reduction(self, before: _BeforeStep) -> Event | None:
        """The suspicion of a gradient that went bad between this rank's backward and the step."""
        if self._gradients is None or not self._gradients_seen or not self._gradients_clean:
            return None
        kind = engines.norm_kind(self._engine) or "inf"
        module, tensor, kind, dtype = before.reduced or ("", "gradients", kind, torch.float32)
        event = self.event("reduction", module, tensor, kind, dtype)
        event = replace(event, micro_step=max(self._clock.backwards - 1, self._clock.step_calls))
        cause = "reduction-overflow" if kind == "inf" else "unknown"
        return event.explained(
            Origin(cause=cause, detail="every gradient of this rank was finite before the reduction")
        )

    def _step_raised(self, before: _BeforeStep) -> None:
        """The call raised: after the step (an observer that ends the run), or for want of a lower loss scale."""
        if engines.steps_taken(self._engine) != before.taken:
            self._after_step(before)
            return
        optimizer = getattr(self._engine, "optimizer", None)
        if getattr(optimizer, "overflow", False) is True and before.scale.dynamic:
            self._publish(self._ledger.search_failed(self._reduction(before)))

    def _after_step(self, before: _BeforeStep) -> None:
        if not (before.boundary or engines.steps_taken(self._engine) != before.taken):
            self._clock.step_calls += 1
            return
        if self.first_bad is None:
            self._judge_step(before)
        self._gradients_seen, self._gradients_clean = 0, True
        self._clock.stepped()

    def _judge_step(self, before: _BeforeStep) -> None:
        skipped = engines.skipped_steps(self._engine) > before.skipped
        if skipped or engines.norm_kind(self._engine) is not None:
            unwatched = self._ledger.earliest() if not self._gradients_seen else None
            found = self._ledger.step_overflowed(self._reduction(before), searching=before.scale.searching)
            self._publish(unwatched or found)
        else:
            self._publish(self._ledger.step_went_well())
            if not self._gradients_seen:
                self._ledger.backward_went_well()
        if not skipped:
            self._look_at_weights()

    def _look_at_weights(self) -> None:
        for module, name, found in self._forward.weights.scan(self._model):
            event = self.event("step", module, name, found.kind or "", torch.float32)
            event = replace(event, micro_step=max(self._clock.backwards - 1, self._clock.step_calls))
            self._publish(event.explained(Origin(cause="optimizer-born", detail="the optimizer step made it")))
            return

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
) -> Detector:
    """Watch a DeepSpeed engine (or one that behaves like it) or a module for the first non-finite value.

    `max_frames` module calls are kept for the report; the root forwards numbered in `trace_batches` (from 0) are
    printed in full on stderr; after root forward `abort_after_batch` a `BatchLimitReached` is raised. `backward`
    watches gradients too. `mode="sentinel"` reads outputs only, `"frames"` and `"auto"` every weight, input and output.
    `on_first_bad` is called once on this rank with the finding, the report and the patch ("" where none helps); without
    it both are printed on stderr. The run goes on either way. Without an engine, each root forward counts as a step.

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
    )


def _detach(detector: weakref.ref[Detector]) -> None:
    """At the end of the process: what a script stopped on may still be undecided."""
    living = detector()
    if living is not None:
        living.detach()


def _print_report(_: FirstBad, report: str, patch: str) -> None:
    print("\n\n".join(part for part in (report, patch) if part), file=sys.stderr, flush=True)
