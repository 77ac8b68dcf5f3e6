"""The module hooks: reads what goes into and out of every module call and suspects what is not finite.

A module is suspected if its output is bad while its inputs, its own weights and everything below it are good, so the
innermost one is named. A bad input that no module returned was made by the code around, in the module that made the
call. Runs in rank processes only.

Hook order matters under ZeRO-3: an ordinary pre-hook runs after the weights are gathered, a forward hook that is put
first runs before they are released.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from dsdoctor.finding import Phase
from dsdoctor.numerics import trees
from dsdoctor.numerics.batches import Batches
from dsdoctor.numerics.calls import Call, CallStack, versions
from dsdoctor.numerics.engines import takes_hooks
from dsdoctor.numerics.events import Event, Origin
from dsdoctor.numerics.frames import Frame, FrameLog, Row
from dsdoctor.numerics.gradients import GradientWatch
from dsdoctor.numerics.hooks import guarded, recomputing, remove
from dsdoctor.numerics.ledger import Ledger
from dsdoctor.numerics.replay import NotReplayable, RandomState, find_origin
from dsdoctor.numerics.stats import Range, looks_like_mask, measure, only_minus_inf, type_name
from dsdoctor.numerics.weights import WeightWatch, is_harmful

Leaf = tuple[str, Any]
"""A value among a call's arguments or results, with its label before it."""
_REPLAYS = 8
"""Second runs of modules that one detector does at most."""


class Host(Protocol):
    """What the hooks ask of the detector."""

    def event(self, phase: Phase, module: str, tensor: str, kind: str, dtype: torch.dtype) -> Event: ...
    def frame_taken(self) -> None: ...
    def problem(self, error: Exception) -> None: ...


@dataclass(slots=True)
class _Bad:
    label: str
    kind: str
    dtype: torch.dtype
    only_minus: bool


class ForwardWatch:
    """Hooks on every module of the model, from construction to `detach`.

    `suspecting` is off where only the frames are wanted; forwards without gradients are judged only if `inference`.
    `output_bad` and `loss_bad` tell of the root's last forward whether it gave a NaN, and a loss that is not finite.
    """

    def __init__(
        self,
        model: nn.Module,
        host: Host,
        batches: Batches,
        ledger: Ledger,
        frames: FrameLog,
        gradients: GradientWatch | None,
        weights: WeightWatch,
        *,
        suspecting: bool = True,
        inference: bool = False,
    ) -> None:
        self.suspecting = suspecting
        self._inference = inference
        self._root = model
        self._host = host
        self._batches = batches
        self._ledger = ledger
        self._frames = frames
        self._gradients = gradients
        self._weights = weights
        self._names = {id(module): name for name, module in model.named_modules()}
        self._stack = CallStack()
        self._known: dict[int, tuple[weakref.ref[Tensor], int, Range | None]] = {}
        self.output_bad = self.loss_bad = False
        self._counting = False
        self._replaying = False
        self._replays_left = _REPLAYS
        self._handles = list(self._register(model))

    def _register(self, model: nn.Module) -> Iterator[Any]:
        enter, leave = guarded(self._enter, self._host.problem), guarded(self._exit, self._host.problem)
        hooked: set[int] = set()
        for module in filter(takes_hooks, model.modules()):
            yield module.register_forward_pre_hook(enter, with_kwargs=True)
            yield module.register_forward_hook(leave, prepend=True, with_kwargs=True, always_call=True)
            if self._gradients is not None:
                self._gradients.watch_parameters(module, self._names[id(module)], hooked)

    def detach(self) -> None:
        """Remove every hook."""
        remove(self._handles)
        self.reset()

    def reset(self) -> None:
        """A new batch begins: calls whose end was not seen are over."""
        self.output_bad = self.loss_bad = False
        self._stack.clear()
        self._known.clear()

    # ------------------------------------------------------------------ before a forward

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if self._replaying:
            return
        name = self._names.get(id(module))
        if name is None:  # a module that was put into the model after we were attached
            name = self._names[id(module)] = _name_of(self._root, module)
        leaves = list(trees.arguments(args, kwargs))
        if recomputing():
            self._note_taken(name, leaves)
            return
        if not self._stack:
            if module is not self._root:
                self._batches.called_directly(name)
            self._forget()
            self._counting = (torch.is_grad_enabled() or self._inference) and self.suspecting
        call = Call(module, name)
        if self._counting:
            call.random_state = RandomState.now()
            call.versions = versions([leaf for _, leaf in leaves if isinstance(leaf, Tensor)])
        self._read_weights(call)
        self._read_inputs(call, leaves)
        if self._counting:
            self._note_taken(name, leaves)
        self._stack.push(call)

    def _forget(self) -> None:
        """Drop what was noted about the tensors of the call before."""
        self._known.clear()
        if self._gradients is not None:
            self._gradients.forget()

    def _read_weights(self, call: Call) -> None:
        for label, parameter in call.module._parameters.items():
            if parameter is None:
                continue
            found = self._weights.range_of(parameter)
            call.rows.append(Row(label, found, "not gathered"))
            if self._counting and found is not None and found.kind is not None and is_harmful(parameter):
                event = self._host.event("parameter", call.name, label, found.kind, parameter.dtype)
                if not call.spoiled and not self._ledger.is_harmless(event.place):
                    self._ledger.suspect(event.explained(Origin(cause="corrupted-weights")))
                call.spoiled = True
        for label, buffer in call.module._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                call.rows.append(Row(label, self._weights.range_of(buffer), "empty"))

    def _read_inputs(self, call: Call, leaves: list[Leaf]) -> None:
        rows, bad = self._rows(leaves)
        call.inputs = rows
        if not self._counting or not bad:
            return
        self._note_nan(f"{call.name}: input" if call.name else "input", bad)
        if not self._stack:
            self._suspect_batch(call, bad)
        elif found := next((b for b in bad if not b.only_minus), None):
            self._suspect_caller(call, found)

    def _suspect_batch(self, call: Call, bad: list[_Bad]) -> None:
        found = next((b for b in bad if not b.only_minus), bad[0])
        event = self._host.event("input", "", found.label, found.kind, found.dtype)
        if self._ledger.is_harmless(event.place):
            return
        cause = "bad-input" if self._was_bad(found.label) else "cast-overflow"
        self._ledger.suspect(replace(event, origin=Origin(cause=cause), weak=found.only_minus))
        call.spoiled = not found.only_minus

    def _was_bad(self, label: str) -> bool:
        """Whether the value was bad before an engine cast the inputs."""
        if self._batches.raw is None:
            return True
        found = next((t for name, t in trees.arguments(*self._batches.raw) if name == label), None)
        seen = measure(found) if isinstance(found, Tensor) else None
        return seen is None or seen.kind is not None

    def _suspect_caller(self, call: Call, found: _Bad) -> None:
        """A bad input that is no known module's doing: the calling module's own code made it."""
        caller = self._stack.top
        assert caller is not None
        if not caller.spoiled:
            label = f"{found.label} of {call.name}"
            event = self._host.event("forward", caller.name, label, found.kind, found.dtype)
            if self._ledger.is_harmless(event.place):
                return
            self._ledger.suspect(event)
            caller.born_between = (event, call.module)
        caller.spoiled = call.spoiled = True

    # ------------------------------------------------------------------ after a forward

    def _exit(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        if self._replaying:
            return
        if recomputing():
            self._recomputed(module, args, kwargs, output)
            return
        call = self._stack.pop(module)
        if call is None:
            return
        raised = output is None and sys.exc_info()[0] is not None
        leaves = list(trees.leaves(output, "output"))
        rows, bad = self._rows(leaves)
        if raised:
            rows = [Row("output", None, "raised")]
        self._frames.add(Frame(call.name, type(module).__name__, (*call.rows, *call.inputs, *rows)))
        if self._counting:
            self._judge(call, args, kwargs, bad)
            self._note_made(leaves)
        if module is self._root and not self._stack:
            self._root_ended(bad, output)
        self._host.frame_taken()

    def _recomputed(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        """A second forward of activation checkpointing. It must give what the first one gave."""
        inputs, bad_inputs = self._rows(list(trees.arguments(args, kwargs)))
        leaves = list(trees.leaves(output, "output"))
        rows, bad = self._rows(leaves)
        name = self._names.get(id(module), "")
        self._frames.add(Frame(name, f"{type(module).__name__} (recomputed)", (*inputs, *rows)))
        self._note_made(leaves)
        if bad and not bad_inputs and self.suspecting and self._ledger.earliest() is None:
            event = self._host.event("backward", name, f"recomputed {bad[0].label}", bad[0].kind, bad[0].dtype)
            detail = "finite in forward, not finite when activation checkpointing ran the module again"
            self._ledger.suspect(event.explained(Origin(cause="not-reproducible", detail=detail)))
        self._host.frame_taken()

    def _judge(self, call: Call, args: tuple[Any, ...], kwargs: Mapping[str, Any], bad: list[_Bad]) -> None:
        if call.born_between is not None:
            event, child = call.born_between
            self._ledger.explain(event, self._origin(call, args, kwargs, child))
        if not bad:
            return
        self._note_nan(f"{call.name}: {bad[0].label}" if call.name else bad[0].label, bad)
        if not call.spoiled:
            event = self._host.event("forward", call.name, bad[0].label, bad[0].kind, bad[0].dtype)
            if self._ledger.is_harmless(event.place):
                return
            origin = self._origin(call, args, kwargs, None)
            if origin.deliberate:
                self._ledger.excuse(event.place)
                return
            self._ledger.suspect(event.explained(origin))
        if self._stack.top is not None:
            self._stack.top.spoiled = True

    def _origin(self, call: Call, args: tuple[Any, ...], kwargs: Mapping[str, Any], child: nn.Module | None) -> Origin:
        tensors = [t for _, t in trees.arguments(args, kwargs) if isinstance(t, Tensor)]
        if call.random_state is None or self._replays_left == 0 or call.versions != versions(tensors):
            return Origin(detail="not run again: its inputs were overwritten, or enough modules were run again")
        self._replays_left -= 1
        self._replaying = True
        try:
            return find_origin(call.module, args, kwargs, call.random_state, child)
        except NotReplayable as reason:
            return Origin(detail=f"not run again: {reason}")
        except Exception as error:
            self._host.problem(error)
            return Origin(detail=f"a second run failed: {error}")
        finally:
            self._replaying = False

    def _note_nan(self, place: str, bad: list[_Bad]) -> None:
        """Tell the ledger where NaN is first seen after an inf."""
        if any("nan" in b.kind for b in bad):
            self._ledger.became_nan(place)

    def _root_ended(self, bad: list[_Bad], output: Any) -> None:
        loss = loss_labels(output)
        counting, self._counting = self._counting, False
        self.output_bad = counting and any("nan" in b.kind for b in bad)
        self.loss_bad = counting and any(b.label in loss for b in bad)

    # ------------------------------------------------------------------ reading

    def _rows(self, leaves: list[Leaf]) -> tuple[list[Row], list[_Bad]]:
        rows, bad = [], []
        for label, leaf in leaves:
            if not isinstance(leaf, Tensor):
                rows.append(Row(label, None, "None" if leaf is None else "not a tensor"))
                continue
            found = self._measure(leaf)
            rows.append(Row(label, found, type_name(leaf.dtype) if leaf.numel() else "empty"))
            if found is not None and found.kind is not None and not looks_like_mask(leaf):
                bad.append(_Bad(label, found.kind, leaf.dtype, only_minus_inf(leaf)))
        return rows, bad

    def _measure(self, tensor: Tensor) -> Range | None:
        """As `measure`, once for a tensor that is one module's output and the next one's input."""
        version = -1 if tensor.is_inference() else tensor._version
        known = self._known.get(id(tensor))
        if known is not None and known[0]() is tensor and known[1] == version >= 0:
            return known[2]
        found = measure(tensor)
        self._known[id(tensor)] = (weakref.ref(tensor), version, found)
        return found

    def _note_taken(self, name: str, leaves: list[Leaf]) -> None:
        if self._gradients is not None and torch.is_grad_enabled():
            for label, leaf in leaves:
                if isinstance(leaf, Tensor):
                    self._gradients.taken(leaf, name, label)

    def _note_made(self, leaves: list[Leaf]) -> None:
        if self._gradients is not None and torch.is_grad_enabled():
            caller = self._stack.top.name if self._stack.top is not None else ""
            for label, leaf in leaves:
                if isinstance(leaf, Tensor):
                    self._gradients.produced(leaf, caller, f"{label}.grad")


def loss_labels(output: Any) -> set[str]:
    """The labels under which a root's output holds a loss: a single number in one of the usual places."""
    scalars = {label for label, t in trees.leaves(output, "output") if isinstance(t, Tensor) and t.numel() == 1}
    return {"output", "output[0]", "output[loss]"} & scalars


def _name_of(root: nn.Module, module: nn.Module) -> str:
    return next((name for name, known in root.named_modules() if known is module), type(module).__name__)
