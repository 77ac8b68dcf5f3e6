"""The always-on watch: what the blocks of a model return, their gradients and those of the weights, without waiting.

Every tensor costs one reduction into a ring on its device. No value is looked at in a hook, so the run's timing and its
streams stay what they are; the ring is read once per optimizer step. Runs in rank processes only.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from dsdoctor.finding import Phase
from dsdoctor.numerics import trees
from dsdoctor.numerics.batches import Batches
from dsdoctor.numerics.clock import Clock
from dsdoctor.numerics.compiled import Cells
from dsdoctor.numerics.engines import is_compiled, takes_hooks
from dsdoctor.numerics.forward import loss_labels
from dsdoctor.numerics.gradients import Activation, GradientWatch, Weight
from dsdoctor.numerics.headroom import Recorder
from dsdoctor.numerics.hooks import guarded, recomputing, remove
from dsdoctor.numerics.points import blocks
from dsdoctor.numerics.readings import Note, Reading
from dsdoctor.numerics.ring import LIMIT, Place, Rings
from dsdoctor.numerics.stats import type_name


class Host(Protocol):
    """What the hooks ask of the detector."""

    clock: Clock
    headroom: Recorder

    def problem(self, error: Exception) -> None: ...


class Sentinel:
    """Hooks on the root and its blocks, and on the gradients of the weights, until `detach`.

    `after_backward`, where it is set, is called at the end of the next backward.
    """

    def __init__(self, root: nn.Module, host: Host, batches: Batches, *, backward: bool) -> None:
        self._points = blocks(root)
        self._names = {id(module): name for name, module in self._points}
        self._host = host
        self._batches = batches
        self._heartbeat = Heartbeat(self._points)
        self._rings = Rings()
        self.after_backward: Callable[[], None] | None = None
        self._queued = self._started = False
        self._backward_of: tuple[int, int] | None = None
        self._training = False
        self._notes: list[tuple[Note, Place]] = []
        self._seen: dict[int, tuple[weakref.ref[Tensor], int, Place | None]] = {}
        self._gradients = GradientWatch(self._gradient, host.problem) if backward else None
        self._cells = Cells(self._points)
        self._handles = [*self._register(root), *self._cells.handles]

    def _register(self, root: nn.Module) -> list[Any]:
        problem = self._host.problem
        enter, leave = guarded(self._enter, problem), guarded(self._exit, problem)
        handles = [
            root.register_forward_pre_hook(guarded(self._inputs, problem), with_kwargs=True),
            root.register_forward_hook(guarded(self._outputs, problem), prepend=True, with_kwargs=True),
        ]
        for _, module in self._points:
            handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            handles.append(module.register_forward_hook(leave, prepend=True, with_kwargs=True))
        if self._gradients is not None:
            hooked: set[int] = set()
            for name, module in root.named_modules():
                if takes_hooks(module):
                    self._gradients.watch_parameters(module, name, hooked)
        return handles

    def detach(self) -> None:
        """Remove every hook."""
        remove(self._handles)
        if self._gradients is not None:
            self._gradients.detach()
        self._notes.clear()
        self._seen.clear()

    # ------------------------------------------------------------------ what is recorded

    @property
    def is_filling_up(self) -> bool:
        """Whether so much is recorded without a step that it should be read now."""
        return len(self._notes) > LIMIT // 2

    def reset(self, *, training: bool) -> None:
        """A batch begins: drop what was noted about the tensors of the one before.

        `training` is told here because the blocks of a checkpointed forward run without gradients.
        """
        self._training = training
        self._queued = False
        self._seen.clear()
        if self._gradients is not None:
            self._gradients.forget(self._now())

    def loss(self, loss: Tensor) -> None:
        """The loss that the engine is handed."""
        self._record(loss, "loss", "", "loss", loss=True)

    def _inputs(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if not self._training or recomputing() or self._batches.nested:
            return
        raw = dict(trees.arguments(*self._batches.raw)) if self._batches.raw is not None else {}
        for label, leaf in trees.arguments(args, kwargs):
            if isinstance(leaf, Tensor):
                before = raw.get(label)
                if isinstance(before, Tensor) and before is not leaf:
                    self._record(before, "input", "", label)
                    self._record(leaf, "input", "", label, cast=True)
                else:
                    self._record(leaf, "input", "", label)

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        name = self._names.get(id(module), "")
        if not recomputing() and self._batches.called_directly(name):
            self._inputs(module, args, kwargs)
        if self._gradients is not None and self._training:
            for label, leaf in trees.arguments(args, kwargs):
                if isinstance(leaf, Tensor):
                    self._gradients.taken(leaf, name, label)

    def _exit(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        if not self._training:
            return
        name = self._names.get(id(module), "")
        if not recomputing():
            self._heartbeat.heard(name)
            self._record_outputs(name, output, set())
        self._note_made(name, output)

    def _outputs(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        if self._training and not recomputing() and not self._batches.nested:
            self._heartbeat.root_ended()
            self._record_outputs("", output, loss_labels(output))
            self._note_made("", output)

    def _record_outputs(self, name: str, output: Any, losses: set[str]) -> None:
        for label, leaf in trees.leaves(output, "output"):
            if isinstance(leaf, Tensor):
                self._record(leaf, "forward", name, label, loss=label in losses)

    def _note_made(self, name: str, output: Any) -> None:
        if self._gradients is not None:
            for label, leaf in trees.leaves(output, "output"):
                if isinstance(leaf, Tensor):
                    self._gradients.produced(leaf, name, f"{label}.grad")

    def _gradient(self, gradient: Tensor, owner: Activation | Weight) -> None:
        if self.after_backward is not None and not self._queued:
            self._queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self.after_backward)
        if isinstance(owner, Activation):  # which tells where a pipeline's backward is: not in the last forward's batch
            self._backward_of = owner.moment
        moment = self._backward_of or self._now()
        self._note(self._rings.record(gradient), Note("backward", "", "", gradient.dtype, *moment, owner))

    def _record(self, tensor: Tensor, phase: Phase, module: str, label: str, **more: Any) -> None:
        """Note a tensor of the forward; one that was noted in this batch as another module's output has its row."""
        version = -1 if tensor.is_inference() else tensor._version
        known = self._seen.get(id(tensor))
        if known is None or known[0]() is not tensor or not known[1] == version >= 0:
            known = (weakref.ref(tensor), version, self._rings.record(tensor))
            self._seen[id(tensor)] = known
        self._note(known[2], Note(phase, module, label, tensor.dtype, *self._now(), **more))

    def _note(self, place: Place | None, note: Note) -> None:
        if place is not None:
            self._notes.append((note, place))

    def _now(self) -> tuple[int, int]:
        return self._host.clock.batch, self._host.clock.micro_step

    # ------------------------------------------------------------------ reading

    def start_reading(self, *, trained: bool = False) -> None:
        """All rows of this step are written: start to copy them. `trained` says that there was a forward for sure."""
        self._started = True
        if trained and not self._notes:
            self._heartbeat.backward_ended()
        self._rings.start_reading()

    def finish_reading(self) -> list[Reading]:
        """What was recorded since the last reading: in the order of time, then what compiled code left."""
        if not self._started:  # an engine whose accumulation ends where the script says does not tell before
            self._rings.start_reading()
        self._started = False
        self._rings.finish_reading()
        self._seen.clear()
        self._backward_of = None
        notes = enumerate(self._notes)
        readings = [Reading(note, order, *rows.read[index]) for order, (note, (rows, index)) in notes]
        self._notes.clear()
        for reading in readings:
            if reading.note.phase == "forward":
                note, step = reading.note, self._host.clock.step
                self._host.headroom.note(note.module, type_name(note.dtype), reading.largest, step)
        return [*readings, *self._from_compiled_code(readings)]

    def _from_compiled_code(self, readings: list[Reading]) -> list[Reading]:
        """Which batch of the step it was is not known: it is told of the first."""
        if any(reading.note.phase == "backward" for reading in readings):
            self._heartbeat.backward_ended()
        if not self._heartbeat.misses:
            return []
        first = readings[0].note if readings else None
        batch, micro_step = (first.batch, first.micro_step) if first is not None else self._now()
        found: list[Reading] = []
        for name, low, high in self._cells.read():
            self._heartbeat.heard_late(name)
            note = Note("forward", name, "output", torch.float32, batch, micro_step)
            found.append(Reading(note, len(readings) + len(found), low, high))
        return found

    def silence(self) -> str | None:
        """What to tell the user if blocks that should have reported by the last reading did not."""
        return self._heartbeat.silence()


class Heartbeat:
    """Notices blocks whose hooks do not run although the root's forward does.

    torch.compile does so: code that was compiled before the hooks came is used on without them. A block that is skipped
    now and then (layer drop, a head for another task) is no silence: all blocks, or half of those heard before, are.
    """

    def __init__(self, points: list[tuple[str, nn.Module]]) -> None:
        self._points = len(points)
        self._compiled = any(is_compiled(module) for _, module in points)
        self._now: set[str] = set()
        self._late: set[str] = set()
        self._most = 0
        self._fewest: int | None = None

    @property
    def misses(self) -> bool:
        """Whether a forward since the last call of `silence` was not heard of by all blocks."""
        return self._fewest is not None and self._fewest < self._points

    def heard(self, name: str) -> None:
        """The block's hook ran."""
        self._now.add(name)

    def heard_late(self, name: str) -> None:
        """The block's compiled code left something."""
        self._late.add(name)

    def root_ended(self) -> None:
        """The root's forward ended: whoever has not reported by now was not asked."""
        count = len(self._now)
        self._fewest = count if self._fewest is None else min(self._fewest, count)
        self._most = max(self._most, count)
        self._now.clear()

    def backward_ended(self) -> None:
        """Gradients came: there was a forward, even if the root's own hooks were silent too."""
        if self._fewest is None:
            self.root_ended()

    def silence(self) -> str | None:
        """The warning, where there is one."""
        expected = self._most or self._points
        fewest, late = self._fewest, len(self._late)
        self._fewest = None
        self._late.clear()
        if fewest is None or not self._points or 2 * (fewest + late) >= expected:
            return None
        why = (
            "its compiled code runs without the hooks" if self._compiled else "torch.compile reuses code without hooks"
        )
        return (
            f"the sentinel heard of {fewest} of {expected} blocks in a forward: {why}, or they are not called. Attach "
            "before the first compiled call, or set torch._dynamo.config.skip_nnmodule_hook_guards = False"
        )
