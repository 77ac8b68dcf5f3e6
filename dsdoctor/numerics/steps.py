"""Judges one optimizer step by what the engine says before and after it. Runs in rank processes only.

A skipped step, a gradient norm that is not finite and weights that went bad are told apart here: by the reduction over
ranks, by the optimizer, or by the search for a loss scale.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import nn

from dsdoctor.finding import FirstBad, Phase
from dsdoctor.numerics import engines
from dsdoctor.numerics.clock import Clock
from dsdoctor.numerics.engines import Scale
from dsdoctor.numerics.events import Event, Origin
from dsdoctor.numerics.ledger import Ledger
from dsdoctor.numerics.stats import measure
from dsdoctor.numerics.weights import WeightWatch

_MARGIN = 1024.0
"""By how much the reduction over ranks is allowed to enlarge a gradient before the optimizer's state is looked at."""


class Host(Protocol):
    """What the judgement of a step asks of the detector."""

    clock: Clock

    @property
    def first_bad(self) -> FirstBad | None: ...
    def event(self, phase: Phase, module: str, tensor: str, kind: str, dtype: torch.dtype) -> Event: ...
    def publish(self, event: Event | None) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Before:
    """What an engine said before an optimizer step, to compare with afterwards. `reduced` is a bad reduced gradient."""

    boundary: bool
    taken: int | None
    skipped: int
    scale: Scale
    reduced: tuple[str, str, str, torch.dtype] | None


@dataclass(slots=True)
class Gradients:
    """This rank's own gradients since the last optimizer step: how many were seen, whether all were finite, and the
    largest magnitude."""

    seen: int = 0
    clean: bool = True
    largest: float = 0.0

    def may_spoil(self, state: torch.dtype) -> bool:
        """Whether their squares, summed over ranks, could pass the largest number of an optimizer's state."""
        return not self.clean or not self.seen or self.largest > torch.finfo(state).max ** 0.5 / _MARGIN


class StepJudge:
    """Judges the steps of one engine. `thorough` reads the reduced gradients, the weights and the optimizer's state."""

    def __init__(self, engine: Any, model: nn.Module, host: Host, ledger: Ledger) -> None:
        self._engine = engine
        self._model = model
        self._host = host
        self._ledger = ledger
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}

    def before(self, gradients: Gradients, *, thorough: bool) -> Before:
        """Look at the engine before the call that may take a step."""
        engine = self._engine
        boundary = bool(engine.is_gradient_accumulation_boundary())
        look = boundary and thorough and gradients.seen and gradients.clean and self._host.first_bad is None
        return Before(
            boundary=boundary,
            taken=engines.steps_taken(engine),
            skipped=engines.skipped_steps(engine),
            scale=engines.loss_scale(engine),
            reduced=self._bad_reduced() if look else None,
        )

    def took_step(self, before: Before) -> bool:
        """Whether the call was the end of an accumulation."""
        return before.boundary or engines.steps_taken(self._engine) != before.taken

    def skipped(self, before: Before) -> bool:
        """Whether the step that was attempted was skipped."""
        return engines.skipped_steps(self._engine) > before.skipped

    def raised(self, before: Before, gradients: Gradients) -> None:
        """The step gave up for want of a lower loss scale."""
        optimizer = getattr(self._engine, "optimizer", None)
        if getattr(optimizer, "overflow", False) is True and before.scale.dynamic:
            self._host.publish(self._ledger.search_failed(self._reduction(before, gradients)))

    def after(self, before: Before, gradients: Gradients, weights: WeightWatch | None) -> None:
        """Judge a step that was attempted; where it was applied, look at the weights if `weights` is given."""
        skipped = self.skipped(before)
        if skipped or engines.norm_kind(self._engine) is not None:
            unwatched = self._ledger.earliest() if not gradients.seen else None
            found = self._ledger.step_overflowed(self._reduction(before, gradients), searching=before.scale.searching)
            self._host.publish(unwatched or found)
        else:
            self._host.publish(self._ledger.step_went_well())
            if not gradients.seen:
                self._ledger.backward_went_well()
        if not skipped and weights is not None:
            look_at_weights(self._model, self._host, weights, getattr(self._engine, "optimizer", None), gradients)

    def _bad_reduced(self) -> tuple[str, str, str, torch.dtype] | None:
        for parameter, gradient in engines.reduced_gradients(self._engine):
            found = measure(gradient)
            if found is not None and found.kind is not None:
                name = self._names.get(id(parameter), "")
                module, _, label = name.rpartition(".")
                return module, f"{label}.grad" if label else "gradients", found.kind, gradient.dtype
        return None

    def _reduction(self, before: Before, gradients: Gradients) -> Event | None:
        """The suspicion of a gradient that went bad between this rank's backward and the step."""
        if not gradients.seen or not gradients.clean:
            return None
        kind = engines.norm_kind(self._engine) or "inf"
        module, tensor, kind, dtype = before.reduced or ("", "gradients", kind, torch.float32)
        event = _at_the_end(self._host, "reduction", module, tensor, kind, dtype)
        cause = "reduction-overflow" if "inf" in kind else "unknown"
        return event.explained(
            Origin(cause=cause, detail="every gradient of this rank was finite before the reduction")
        )


def look_at_weights(model: nn.Module, host: Host, weights: WeightWatch, optimizer: Any, gradients: Gradients) -> None:
    """Report a weight, or else a tensor of the optimizer's state, that is bad after a step was applied."""
    for module, name, found in weights.scan(model):
        event = _at_the_end(host, "step", module, name, found.kind or "", torch.float32)
        host.publish(event.explained(Origin(cause="optimizer-born", detail="the optimizer step made it")))
        return
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for module, name, tensor in engines.optimizer_state(optimizer, names):
        if not tensor.is_floating_point() or not gradients.may_spoil(tensor.dtype):
            continue
        seen = measure(tensor)
        if seen is not None and seen.kind is not None:
            event = _at_the_end(host, "step", module, name, seen.kind, tensor.dtype)
            detail = "the weights are finite, the optimizer's state is not"
            host.publish(event.explained(Origin(cause="optimizer-born", detail=detail)))
            return


def look_at_old_weights(model: nn.Module, weights: WeightWatch, event: Event) -> Event | None:
    """The event of a weight that was bad before this one, None if all are finite.

    For a watch that does not read the weights after each step: where they are bad now and were not when it began, the
    step before this one made them so.
    """
    if event.phase in ("reduction", "step"):
        return None
    bad = next(weights.scan(model), None)
    if bad is None:
        return None
    module, name, found = bad
    if event.step == 0 or (module, name) in weights.bad_at_start:
        origin = Origin(cause="corrupted-weights", detail="it was so before the first step")
        return replace(
            event, phase="parameter", module=module, tensor=name, kind=found.kind or "", origin=origin, weak=False
        )
    origin = Origin(cause="optimizer-born", detail="it was finite when the detector was attached; a step made it so")
    return replace(
        event, step=event.step - 1, phase="step", module=module, tensor=name, kind=found.kind or "", origin=origin
    )


def _at_the_end(host: Host, phase: Phase, module: str, tensor: str, kind: str, dtype: torch.dtype) -> Event:
    """An event of the accumulation's last micro-step."""
    return replace(host.event(phase, module, tensor, kind, dtype), micro_step=host.clock.last_micro_step)
