"""Keeps each micro-batch of the running step, and examines the one that went bad. Runs in rank processes only.

What it adds to the detector's finding: whether the batch goes bad again, whether it is finite in fp32, which samples
do it, and which remedy helps. Nothing of it reaches the user's run, and a failure here is told, not raised.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dsdoctor.finding import FirstBad
from dsdoctor.numerics import anomaly, engines, flushed, trees, trying
from dsdoctor.numerics.again import Batch, events_of, framed
from dsdoctor.numerics.bench import Bench, Result
from dsdoctor.numerics.bundle import save
from dsdoctor.numerics.detector import Detector
from dsdoctor.numerics.examined import Examined
from dsdoctor.numerics.hooks import guarded, recomputing
from dsdoctor.numerics.repeating import repeats
from dsdoctor.numerics.replay import NotReplayable
from dsdoctor.numerics.underflow import Underflow

_SETTLED = 8
"""The optimizer step from which on gradient underflow is measured, once."""
_KEPT = 64
"""Batches of one optimizer step that are remembered (by reference)."""


@dataclass(slots=True)
class _Kept:
    """A batch of the running step, and the gradients of the root's outputs once backward made them."""

    step: int
    micro_step: int
    batch: Batch
    gradients: dict[str, Tensor] = field(default_factory=dict)


class Examiner:
    """Hooks on the root module of a detector's model.

    `folder` is where a bundle is written, None for no bundle; `order` is what started this run, to go into the bundle.
    """

    def __init__(self, target: Any, folder: Path | None, order: Mapping[str, Any] | None = None) -> None:
        self._target = target
        self._model = engines.user_model(target)
        self._folder = folder
        self._order = dict(order or {})
        self._kept: list[_Kept] = []
        self._detector: weakref.ref[Detector] = lambda: None  # type: ignore[assignment]
        self._handles: list[Any] = []
        self.underflow: Underflow | None = None
        self._underflow_at = _SETTLED

    def follow(self, detector: Detector) -> None:
        """Keep the batches of the model that this detector watches. Its hooks come first."""
        self._detector = weakref.ref(detector)
        root = self._model
        self._handles = [
            root.register_forward_pre_hook(guarded(self._begins, detector.problem), with_kwargs=True),
            root.register_forward_hook(guarded(self._ended, detector.problem)),
        ]

    def examine(self, found: FirstBad) -> Examined:
        """What can be told of a bad value by running its batch again. Never raises."""
        kept = next((k for k in self._kept if (k.step, k.micro_step) == (found.step, found.micro_step)), None)
        kept = kept or (self._kept[-1] if self._kept else None)
        try:
            if found.phase in ("reduction", "step"):
                raise NotReplayable("it was made after the backward of the batch")
            if kept is None:
                raise NotReplayable("the forward of its batch was not seen")
            known = examined(self._model, kept.batch, kept.gradients, found)
        except Exception as reason:
            why = str(reason) if isinstance(reason, NotReplayable) else f"{type(reason).__name__}: {reason}"
            known = Examined(why_not=why, trials=trying.untried(found, why))
        return self._bundled(known, found, kept)

    def _bundled(self, known: Examined, found: FirstBad, kept: _Kept | None) -> Examined:
        if self._folder is None or kept is None:
            return known
        try:
            about = {"rank": found.rank, "first_bad": asdict(found), "examined": known.to_dict(), "order": self._order}
            place = save(self._folder, self._model, kept.batch, kept.gradients, about)
        except Exception:
            return known  # a full disk costs the bundle, nothing else
        return replace(known, bundle=str(place))

    # ------------------------------------------------------------------ hooks

    def _begins(self, _: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        detector = self._detector()
        if detector is None or recomputing() or not torch.is_grad_enabled():
            return
        step, micro_step = detector.clock.step, detector.clock.micro_step
        if step >= self._underflow_at and detector.first_bad is None:
            self._look_for_underflow(step)
        self._kept = [kept for kept in self._kept if kept.step == step][-_KEPT:]
        self._kept.append(_Kept(step, micro_step, Batch.now(detector.clock.batch, micro_step, args, kwargs)))

    def _look_for_underflow(self, step: int) -> None:
        """Once the scale has settled: which share of the gradients of the step before was flushed to zero."""
        done = next((kept for kept in self._kept if kept.step < step and kept.gradients), None)
        if done is None or not any(p.dtype is torch.float16 for p in self._model.parameters()):
            return
        gradient = next(iter(done.gradients.values()))
        if not bool(gradient.isfinite().all()):
            return
        self._underflow_at = 1 << 62
        bench = Bench(self._model, done.batch, done.gradients, None)
        scale = engines.loss_scale(self._target).value
        self.underflow = flushed.measure(bench, step=done.step, scale=scale)

    def _ended(self, _: Any, args: Any, output: Any) -> None:
        """Have backward leave the gradients of the outputs with the batch."""
        if not self._kept or recomputing() or not torch.is_grad_enabled():
            return
        gradients = self._kept[-1].gradients
        for label, leaf in trees.leaves(output, "output"):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(_keeper(gradients, label))


def examined(model: nn.Module, batch: Batch, gradients: Mapping[str, Tensor], found: FirstBad) -> Examined:
    """Run a batch again as it was, in fp32, and with remedies.

    Raises:
        NotReplayable: weights are partitioned, an input was overwritten since, or the model communicates.
    """
    until = time.monotonic() + trying.SECONDS
    bench = Bench(model, batch, gradients, found.module if found.tensor.startswith("output") else None)
    again = bench.run(bits=True)
    late = Result(outcome="not-tried", why="out of time")
    shadow = bench.run(dtype=torch.float32) if time.monotonic() < until else late
    rows = bad_rows(batch) or _batch_rows(batch, again)
    worth = again.outcome != "finite"
    vanished = not worth and _has_to_come_back(found, gradients)
    return Examined(
        again=again.outcome,
        in_fp32=shadow.outcome,
        loss_in_fp32=shadow.loss if shadow.outcome == "finite" else None,
        why_not="" if worth else "the batch is finite when it runs again",
        samples=rows,
        derivative=anomaly.derivative(bench) if found.phase == "backward" and worth else None,
        trials=trying.trials(bench, found, shadow, rows, until) if worth else (),
        repeats=repeats(bench, again, lambda: _first_place(model, batch), until) if vanished else None,
    )


def _has_to_come_back(found: FirstBad, gradients: Mapping[str, Tensor]) -> bool:
    """Whether a second run does all that made the value: no loss outside of the model, no gradient from there."""
    if found.phase == "backward":
        return bool(gradients) and all(bool(gradient.isfinite().all()) for gradient in gradients.values())
    return found.phase == "forward"


def _first_place(model: nn.Module, batch: Batch) -> str:
    """Where a value of the batch's forward goes bad as things are now, in words; empty where nowhere."""
    seen = framed(model, batch, events_of(0), max_frames=1)
    if seen is None:
        return ""
    parts = (
        f"{seen.module or 'the model'}: {seen.tensor}",
        seen.origin.op,
        seen.origin.line and f"at {seen.origin.line}",
    )
    return ", ".join(part for part in parts if part)


def _keeper(gradients: dict[str, Tensor], label: str) -> Any:
    def keep(gradient: Tensor) -> None:
        gradients.setdefault(label, gradient.detach())  # that of the outermost call, where the root calls itself

    return keep


def bad_rows(batch: Batch) -> tuple[int, ...]:
    """The samples whose inputs are not finite, where others are finite."""
    for _, leaf in trees.arguments(batch.args, batch.kwargs):
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dim():
            finite = leaf.detach().flatten(1).isfinite().all(1) if leaf.dim() > 1 else leaf.isfinite()
            if not bool(finite.all()) and bool(finite.any()):
                return tuple((~finite).nonzero().flatten().tolist())
    return ()


def _batch_rows(batch: Batch, result: Result) -> tuple[int, ...]:
    """The rows of the flagged output, where they can be samples: as many rows as the batch has."""
    sizes = {
        leaf.shape[0]
        for _, leaf in trees.arguments(batch.args, batch.kwargs)
        if isinstance(leaf, Tensor) and leaf.dim()
    }
    return result.bad_rows if result.rows in sizes else ()
