"""Runs a flagged batch's forward again with a frame for every module. Runs in rank processes only.

The always-on watch knows in which block a value went bad, and nothing of the calls inside it. Before the next optimizer
step is taken the weights are still those of the batch, so its forward is run once more: same inputs, random numbers and
autocast, no gradients, none of the engine's hooks, and whatever it changes is put back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from dsdoctor.finding import Phase
from dsdoctor.numerics import replay, trees
from dsdoctor.numerics.batches import Batches, Call
from dsdoctor.numerics.calls import versions
from dsdoctor.numerics.engines import autocast_in_force, is_whole
from dsdoctor.numerics.events import Event
from dsdoctor.numerics.forward import ForwardWatch
from dsdoctor.numerics.frames import FrameLog
from dsdoctor.numerics.hooks import second_run
from dsdoctor.numerics.ledger import Ledger
from dsdoctor.numerics.replay import NotReplayable, RandomState
from dsdoctor.numerics.stats import type_name
from dsdoctor.numerics.weights import WeightWatch

MakeEvent = Callable[[Phase, str, str, str, torch.dtype], Event]


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What the root was called with (references, no copies), and what its forward's result depends on besides."""

    number: int
    micro_step: int
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    versions: tuple[int, ...]
    random: RandomState
    autocast: tuple[str, torch.dtype] | None

    @classmethod
    def now(cls, number: int, micro_step: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Batch:
        return cls(
            number=number,
            micro_step=micro_step,
            args=args,
            kwargs=dict(kwargs),
            versions=_versions(args, kwargs),
            random=RandomState.now(),
            autocast=autocast_in_force(),
        )


def events_of(step: int) -> MakeEvent:
    """Events of a second run that stands alone: which batch it is of is put in by `framed`."""

    def make(phase: Phase, module: str, tensor: str, kind: str, dtype: torch.dtype) -> Event:
        return Event(
            step=step, micro_step=0, phase=phase, module=module, tensor=tensor, kind=kind, dtype=type_name(dtype),
            batch=0,
        )  # fmt: skip

    return make


class NoCommunication(TorchDispatchMode):
    """A second run on one rank alone must not enter a collective: the other ranks would never come."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in replay.COMMUNICATION:
            raise NotReplayable("it communicates with other ranks")
        return func(*args, **(kwargs or {}))


class _Witness:
    """What the hooks of the second run report to."""

    def __init__(self, batch: Batch, make: MakeEvent, frames: FrameLog) -> None:
        self.problems: list[Exception] = []
        self._batch = batch
        self._make = make
        self._frames = frames

    def event(self, phase: Phase, module: str, tensor: str, kind: str, dtype: torch.dtype) -> Event:
        event = self._make(phase, module, tensor, kind, dtype)
        batch = self._batch
        return replace(event, micro_step=batch.micro_step, batch=batch.number, frames=self._frames.last())

    def problem(self, error: Exception) -> None:
        self.problems.append(error)

    def batch_begins(self, *, training: bool, call: Call | None) -> None:
        pass

    def batch_ended(self, output: Any, *, raised: bool) -> None:
        pass

    def frame_taken(self) -> None:
        pass


def framed(root: nn.Module, batch: Batch, make: MakeEvent, max_frames: int) -> Event | None:
    """The first bad value of the batch's forward, with its frames and operation; None if it does not come back.

    Raises:
        NotReplayable: the weights are partitioned, an input was overwritten since, or the model communicates.
    """
    if not is_whole(root):
        raise NotReplayable("its weights are partitioned: every rank would have to take part")
    if overwritten(batch):
        raise NotReplayable("its inputs were overwritten since")
    frames, ledger = FrameLog(max_frames), Ledger()
    witness = _Witness(batch, make, frames)
    with replay.undone(root, batch.random), second_run(), torch.no_grad(), _autocast(batch), NoCommunication():
        replay.strip_hooks(root, None, [])
        batches = Batches(root, witness)
        watch = ForwardWatch(root, witness, batches, ledger, frames, None, WeightWatch(), inference=True)
        try:
            root(*batch.args, **batch.kwargs)
        finally:
            watch.detach()
            batches.detach()
    return ledger.earliest()


def overwritten(batch: Batch) -> bool:
    """Whether a tensor of the batch was changed in place since its forward began."""
    return _versions(batch.args, batch.kwargs) != batch.versions


def _autocast(batch: Batch) -> Any:
    device, dtype = batch.autocast or ("cpu", torch.bfloat16)
    return torch.autocast(device, dtype=dtype, enabled=batch.autocast is not None)


def _versions(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[int, ...]:
    return tuple(versions([t for _, t in trees.arguments(args, kwargs) if isinstance(t, Tensor)]))
