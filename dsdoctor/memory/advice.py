"""What would fit: the largest micro-batch and sequence, the number of GPUs, and how to load with less host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal

from dsdoctor.memory.activations import Workload
from dsdoctor.memory.facts import Advice
from dsdoctor.memory.ladder import Room, judged, need_of, rows
from dsdoctor.memory.setup import Setup

_MOST_HOSTS = 1024
_MOST = 1 << 24
_LOADING_SHARE = 0.25
"""Share of the host from which on loading is worth a word."""


def advise(setup: Setup, config: Mapping[str, Any], room: Room, *, fits: bool) -> Advice:
    """Advice for the given config. `fits` says whether some row does as things are."""
    work = setup.work
    known = setup.activations.known and setup.model.shape is not None
    micro = sequence = row_micro = None
    if known and _judgeable(setup, room):
        micro = largest(lambda count: _fits(setup, room, replace(work, micro_batch=count)))
        sequence = largest(lambda count: _fits(setup, room, replace(work, sequence=count)))
    if known and not fits and work.micro_batch > 1:
        row_micro = largest(
            lambda count: _some_row_fits(setup, config, room, replace(work, micro_batch=count)), most=work.micro_batch
        )
    return Advice(
        micro_batch=micro,
        sequence=sequence,
        row_micro_batch=row_micro,
        checkpointing=_checkpointing(setup, config, room, fits=fits) if known and _judgeable(setup, room) else None,
        ranks=None if fits else _ranks(setup, config, room),
        loading=(*(_sharded_build(setup, config, room) if not fits else ()), *_loading(setup, room)),
    )


def _checkpointing(
    setup: Setup, config: Mapping[str, Any], room: Room, *, fits: bool
) -> Literal["given", "row"] | None:
    """What activation checkpointing, which the script or the model switches on, would make fit."""
    work = replace(setup.work, checkpointing=True)
    if setup.work.checkpointing or _fits(setup, room, setup.work):
        return None
    if _fits(setup, room, work):
        return "given"
    return "row" if not fits and _some_row_fits(setup, config, room, work) else None


def largest(fits: Callable[[int], bool], *, most: int = _MOST) -> int:
    """The largest number up to `most` that fits, 0 where 1 does not; what fits is taken to be monotone."""
    if not fits(1):
        return 0
    low, high = 1, 2
    while high <= most and fits(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _fits(setup: Setup, room: Room, work: Workload) -> bool:
    return judged(need_of(replace(setup, work=work)), room, device=setup.device).fits is True


def _some_row_fits(setup: Setup, config: Mapping[str, Any], room: Room, work: Workload) -> bool:
    return any(one.fits for one in rows(replace(setup, work=work), config, room))


def _judgeable(setup: Setup, room: Room) -> bool:
    return (room.gpu if setup.device == "cuda" else room.host) is not None


def _ranks(setup: Setup, config: Mapping[str, Any], room: Room) -> int | None:
    """Whole hosts are added until some row fits; None where none ever does, or nothing is known of the machine."""
    if not _judgeable(setup, room):
        return None
    hosts = setup.ranks // setup.ranks_per_host
    while hosts < _MOST_HOSTS:
        hosts += max(1, hosts // 4)
        ranks = hosts * setup.ranks_per_host
        more = replace(setup, ranks=ranks, expert_ranks=max(1, ranks // setup.model.expert_parallel))
        if any(one.fits for one in rows(more, config, room)):
            return ranks
    return None


def _sharded_build(setup: Setup, config: Mapping[str, Any], room: Room) -> Iterator[str]:
    """Whether only the whole model, moved to each GPU before it is cut, is too large."""
    if setup.zero_init:
        return
    fitting = [one for one in rows(replace(setup, zero_init=True), config, room) if one.fits]
    if fitting:
        best = min(fitting, key=lambda one: one.cost_rank)
        where = " and ".join(
            dict.fromkeys(one for one in (best.offload_optimizer, best.offload_param) if one != "none")
        )
        offload = f" with offload to {where}" if where else ""
        yield f"built under deepspeed.zero.Init, no rank holds the whole model, and stage 3{offload} fits"


def _loading(setup: Setup, room: Room) -> Iterator[str]:
    """How to need less before the first step."""
    whole = setup.ranks_per_host * setup.model.loaded
    if setup.built_in_shards or room.host is None or whole < _LOADING_SHARE * room.host:
        return
    if setup.stage == 3:
        yield "build the model under deepspeed.zero.Init (Transformers does so where the ds_config is known beforehand)"
    else:
        yield "let the ranks of a host load one after the other, or rank 0 alone and the others on the meta device"
    if setup.weight == 2 and setup.model.loaded > 2 * setup.model.all:
        yield "load it in 16 bit (torch_dtype): half of the host memory that fp32 takes"
    yield "read safetensors instead of pickled files: they are mapped, not copied"
