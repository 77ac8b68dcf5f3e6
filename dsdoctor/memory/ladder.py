"""The rows: every stage, offload and precision that could be chosen, what each needs and costs, and which to take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dsdoctor.dsconfig import patch
from dsdoctor.memory import host, moments
from dsdoctor.memory.facts import DeviceNeed, HostNeed, Moment, Need, Offload
from dsdoctor.memory.setup import Setup
from dsdoctor.memory.traffic import cost

HEADROOM = 0.10
"""Share of the memory that should be left: fragmentation alone takes 5 to 10 %."""

Row = tuple[int, Offload, Offload]
LADDER: tuple[Row, ...] = (
    (0, "none", "none"),
    (1, "none", "none"),
    (2, "none", "none"),
    (3, "none", "none"),
    (1, "cpu", "none"),
    (2, "cpu", "none"),
    (3, "cpu", "none"),
    (3, "none", "cpu"),
    (3, "cpu", "cpu"),
)
"""Stage, offload_optimizer, offload_param. What does nothing below stage 3, or at stage 0, is not in it."""
WITH_NVME: tuple[Row, ...] = ((3, "nvme", "none"), (3, "nvme", "cpu"), (3, "nvme", "nvme"))
SWAP_FOLDER = "/local_nvme"
"""Stands in a patch for the folder that only the user can name."""
_ZERO = "zero_optimization"


@dataclass(frozen=True, kw_only=True)
class Room:
    """What one GPU, one host and one host's NVMe offer a new job. Bytes, None where not known."""

    gpu: int | None = None
    host: int | None = None
    nvme: int | None = None


def need_of(setup: Setup) -> Need:
    """One row, not yet held against a machine."""
    return Need(
        stage=setup.stage,
        offload_optimizer=setup.offload_optimizer,
        offload_param=setup.offload_param,
        precision=setup.precision,
        per_gpu=_device_need(moments.device_moments(setup)),
        per_host=_host_need(host.host_moments(setup)),
        per_nvme=host.nvme(setup),
    )


def rows(given: Setup, config: Mapping[str, Any], room: Room) -> tuple[Need, ...]:
    """The ladder for a config, its own row among them; the cheapest has `cost_rank` 1."""
    own: Row = (given.stage, given.offload_optimizer, given.offload_param)
    nvme = room.nvme is not None or "nvme" in own
    setups = [given.row(*row) for row in (*LADDER, *(WITH_NVME if nvme else ())) if row != own]
    if given.precision == "fp32" and given.weight == 4:
        setups += [
            replace(given.row(*row), precision="bf16", weight=2, computed=2, accumulated=2)
            for row in (*LADDER, *(WITH_NVME if nvme else ()))
        ]
    setups = [one for one in setups if not (one.precision == "fp16" and one.stage == 0)]
    made = [_row(given, config, room, current=True)]
    made += [_row(one, config, room, current=False) for one in setups]
    made.sort(key=lambda one: (_seconds(one), one.stage, one.offload_optimizer == "none"))
    fastest = max(_seconds(made[0]), 1e-9)
    return tuple(
        replace(one, cost_rank=rank, cost=replace(one.cost, slowdown=round(_seconds(one) / fastest, 3)))
        for rank, one in enumerate(made, start=1)
        if one.cost is not None
    )


def recommended(needs: Sequence[Need]) -> int | None:
    """The given config where it fits with room to spare; else the cheapest row that does, or that fits at all.

    Another precision changes the numbers and comes last.
    """
    own = next((one.precision for one in needs if one.current), "")
    order = sorted(
        range(len(needs)),
        key=lambda index: (not needs[index].current, needs[index].precision != own, needs[index].cost_rank),
    )
    for least in (HEADROOM, 0.0):
        for index in order:
            if needs[index].fits and (needs[index].margin or 0.0) >= least:
                return index
    return None


def judged(need: Need, room: Room, *, device: str) -> Need:
    """Say whether it fits the places whose size is known; on a GPU nothing is said without the GPU's."""
    places = [(need.per_host.peak, room.host), (need.per_nvme, room.nvme if need.per_nvme else None)]
    if device == "cuda":
        places.append((need.per_gpu.peak, room.gpu))
    left = [1 - needed / max(there, 1) for needed, there in places if there is not None]
    if not left or (device == "cuda" and room.gpu is None):
        return need
    return replace(need, fits=min(left) >= 0, margin=round(min(left), 4))


def _row(setup: Setup, config: Mapping[str, Any], room: Room, *, current: bool) -> Need:
    need = judged(need_of(setup), room, device=setup.device)
    change = None if current else _patch(config, need)
    return replace(need, current=current, patch=change, cost=cost(setup))


def _seconds(need: Need) -> float:
    return need.cost.seconds if need.cost is not None else 0.0


def _device_need(all_moments: tuple[Moment, ...]) -> DeviceNeed:
    peak = max(all_moments, key=lambda one: one.holding.total)
    training = max((one for one in all_moments if one.name in moments.TRAINING), key=lambda one: one.holding.total)
    held = training.holding
    return DeviceNeed(
        weights=held.weights,
        gradients=held.gradients,
        optimizer=held.optimizer,
        buffers=held.buffers,
        activations=held.activations,
        overhead=held.overhead,
        total=held.total,
        peak=peak.holding.total,
        moment=training.name,
        peak_moment=peak.name,
        moments=all_moments,
    )


def _host_need(all_moments: tuple[Moment, ...]) -> HostNeed:
    before = (host.CONSTRUCTION, *moments.BEFORE_TRAINING)
    init_peak = max(one.holding.total for one in all_moments if one.name in before)
    return HostNeed(**vars(_device_need(all_moments)), init_peak=init_peak)


def _patch(config: Mapping[str, Any], need: Need) -> dict[str, Any]:
    """The smallest merge patch that leads to a row. An offload that is no more is deleted, in its old spelling too."""
    zero: dict[str, Any] = {"stage": need.stage, "cpu_offload": None, "cpu_offload_param": None}
    for key, where in (("offload_optimizer", need.offload_optimizer), ("offload_param", need.offload_param)):
        section = config.get(_ZERO, {}).get(key) if isinstance(config.get(_ZERO), Mapping) else None
        known = section.get("nvme_path") if isinstance(section, Mapping) else None
        more = {"nvme_path": known or SWAP_FOLDER} if where == "nvme" else {}
        zero[key] = None if where == "none" else {"device": where, **more}
    change: dict[str, Any] = {_ZERO: zero}
    if need.precision == "bf16" and not _says_bf16(config):
        change["bf16"] = {"enabled": True}
    return patch.diff(config, patch.apply(config, change))


def _says_bf16(config: Mapping[str, Any]) -> bool:
    return any(isinstance(config.get(name), Mapping) for name in ("bf16", "bfloat16")) and any(
        isinstance(config.get(name), Mapping) and config[name].get("enabled") not in (False, None)
        for name in ("bf16", "bfloat16")
    )
