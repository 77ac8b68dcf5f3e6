"""What a job needs of each GPU and host, for the given config and for the ladder of cheaper ones, and which to take.

A first model: the terms are exact for weights, gradients, optimizer and buffers of plain ZeRO; what it leaves out is
said in `MemoryFacts.assumptions`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from dsdoctor.dsconfig import patch
from dsdoctor.machine.facts import MachineFacts
from dsdoctor.memory import terms
from dsdoctor.memory.facts import DeviceNeed, HostNeed, MemoryFacts, Need, Offload
from dsdoctor.memory.setup import Setup, knows_optimizer, setup_of
from dsdoctor.runs.facts import ModelFacts

HEADROOM = 0.10
"""Share of the memory that should be left: fragmentation takes 5 to 10 %, activations and the rest are not counted."""

_Row = tuple[int, Offload, Offload]
LADDER: tuple[_Row, ...] = (
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
"""Stage, offload_optimizer, offload_param; each slower than the one before. What does nothing below stage 3, or at
stage 0, is not in it."""


def estimate(
    config: Mapping[str, Any],
    model: ModelFacts,
    machine: MachineFacts,
    *,
    nproc_per_node: int,
    nodes: int = 1,
    device: Literal["cpu", "cuda"],
) -> MemoryFacts:
    """The needs of a model under a ds_config on `nodes` hosts like `machine`, `nproc_per_node` ranks on each."""
    ranks = nproc_per_node * nodes
    given = setup_of(
        config,
        model,
        release=machine.versions.get("deepspeed", ""),
        device=device,
        ranks=ranks,
        ranks_per_host=nproc_per_node,
    )
    gpu, host = _gpu_bytes(machine, device), machine.host_available
    needs = tuple(_judged(need, gpu, host, device) for need in _rows(given))
    recommended = _recommended(needs)
    return MemoryFacts(
        needs=needs,
        device=device,
        parameters=model.parameters,
        ranks=ranks,
        ranks_per_host=nproc_per_node,
        gpu_bytes=gpu,
        host_bytes=host,
        recommended=recommended,
        patch=None if recommended is None or needs[recommended].current else _patch(config, needs[recommended]),
        assumptions=tuple(_assumptions(config, given)),
    )


def need_of(setup: Setup) -> Need:
    """One row, not yet held against a machine."""
    device = _device_need(setup)
    return Need(
        stage=setup.stage,
        offload_optimizer=setup.offload_optimizer,
        offload_param=setup.offload_param,
        per_gpu=device,
        per_host=_host_need(setup, device),
        per_nvme=terms.nvme(setup),
    )


def _device_need(setup: Setup) -> DeviceNeed:
    weights, gradients, optimizer = terms.weights(setup), terms.gradients(setup), terms.optimizer(setup)
    buffers = terms.buffers(setup)
    overhead = terms.CUDA_CONTEXT if setup.device == "cuda" else terms.CPU_PROCESS
    kept = weights + optimizer + overhead
    lasting = buffers if setup.stage == 3 else 0
    moments = {
        "initialization": terms.initial_weights(setup) + overhead,
        "backward": kept + gradients + terms.full_gradients(setup) + buffers + terms.gathered(setup),
        "optimizer step": kept + gradients + lasting + terms.step_gradients(setup),
    }
    moment = max(moments, key=lambda name: moments[name])
    return DeviceNeed(
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        buffers=buffers,
        activations=0,
        overhead=overhead,
        total=kept + gradients + buffers,
        peak=moments[moment],
        peak_moment=moment,
    )


def _host_need(setup: Setup, device: DeviceNeed) -> HostNeed:
    """All ranks of a host. On the CPU accelerator the devices' needs are the host's own."""
    ranks = setup.ranks_per_host
    on_cpu = ranks if setup.device == "cpu" else 0
    overhead = ranks * (terms.CPU_PROCESS if setup.device == "cpu" else terms.CUDA_PROCESS)
    need = HostNeed(
        weights=terms.host_weights(setup) + on_cpu * device.weights,
        gradients=terms.host_gradients(setup) + on_cpu * device.gradients,
        optimizer=terms.host_optimizer(setup) + on_cpu * device.optimizer,
        buffers=terms.host_buffers(setup) + on_cpu * device.buffers,
        activations=0,
        overhead=overhead,
        total=0,
        peak=0,
        init_peak=ranks * setup.loaded + overhead + on_cpu * (device.weights if setup.low_precision else 0),
        peak_moment="",
    )
    total = need.weights + need.gradients + need.optimizer + need.buffers + overhead
    running = total + on_cpu * (device.peak - device.total)
    while_loading = need.init_peak > running
    moment = "loading the model" if while_loading else (device.peak_moment if on_cpu else "the first optimizer step")
    return replace(need, total=total, peak=max(running, need.init_peak), peak_moment=moment)


def _rows(given: Setup) -> list[Need]:
    """The ladder, and the given config's row in it (or after it, with NVMe)."""
    own: _Row = (given.stage, given.offload_optimizer, given.offload_param)
    ladder = LADDER if own in LADDER else (*LADDER, own)
    return [
        replace(need_of(given if row == own else given.row(*row)), cost_rank=rank, current=row == own)
        for rank, row in enumerate(ladder, start=1)
    ]


def _judged(need: Need, gpu: int | None, host: int | None, device: Literal["cpu", "cuda"]) -> Need:
    """Say whether it fits; where the machine's memory is not known nothing is said."""
    left = [] if host is None else [1 - need.per_host.peak / max(host, 1)]
    if device == "cuda":
        left = [*left, 1 - need.per_gpu.peak / max(gpu, 1)] if gpu is not None and left else []
    if not left:
        return need
    return replace(need, fits=min(left) >= 0, margin=round(min(left), 4))


def _recommended(needs: Sequence[Need]) -> int | None:
    """The given config where it fits with room to spare; else the cheapest row that does, or that fits at all."""
    order = sorted(range(len(needs)), key=lambda index: (not needs[index].current, needs[index].cost_rank))
    for least in (HEADROOM, 0.0):
        fitting = [index for index in order if needs[index].fits and (needs[index].margin or 0.0) >= least]
        if fitting:
            return fitting[0]
    return None


def _patch(config: Mapping[str, Any], need: Need) -> dict[str, Any]:
    """The smallest merge patch that leads to a row. An offload that is no more is deleted, in its old spelling too."""
    zero: dict[str, Any] = {"stage": need.stage, "cpu_offload": None, "cpu_offload_param": None}
    for key, where in (("offload_optimizer", need.offload_optimizer), ("offload_param", need.offload_param)):
        zero[key] = None if where == "none" else {"device": where}
    return patch.diff(config, patch.apply(config, {"zero_optimization": zero}))


def _gpu_bytes(machine: MachineFacts, device: Literal["cpu", "cuda"]) -> int | None:
    """What the smallest GPU has free; None where there is none or one is not known."""
    if device == "cpu" or not machine.devices:
        return None
    sizes = [one.free_bytes if one.free_bytes is not None else one.total_bytes for one in machine.devices]
    known = [size for size in sizes if size is not None]
    return min(known) if len(known) == len(sizes) else None


def _assumptions(config: Mapping[str, Any], setup: Setup) -> list[str]:
    said = [
        "activations and the batch are not counted: their size is not known before a run",
        "the script builds the whole model in every rank before DeepSpeed takes it (no zero.Init)",
        "temporary tensors of the optimizer's foreach kernels and fragmentation are left to the headroom",
    ]
    if not knows_optimizer(config):
        said.append("the optimizer is not in the config and counts as Adam: 8 bytes of state for a parameter")
    if setup.stage == 3:
        said.append("gathered parameters count as the largest layer and the prefetch bucket; DeepSpeed may keep more")
    if setup.device == "cpu":
        said.append("device memory is host memory here, so the needs of all ranks of a host add up")
    return said
