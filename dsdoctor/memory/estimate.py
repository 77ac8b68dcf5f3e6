"""What a job needs of each GPU, host and disk, for the given config and for the ladder of others, and which to take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dsdoctor.machine.facts import MachineFacts
from dsdoctor.memory import advice
from dsdoctor.memory.activations import Activations, Workload
from dsdoctor.memory.divides import expert_parallel, sequence_parallel
from dsdoctor.memory.facts import Checkpoint, MemoryFacts
from dsdoctor.memory.inventory import Inventory, of_facts, split_experts
from dsdoctor.memory.ladder import Room, recommended, rows
from dsdoctor.memory.setup import Setup, knows_optimizer, setup_of
from dsdoctor.memory.table import table
from dsdoctor.runs.facts import ModelFacts


@dataclass(frozen=True, kw_only=True)
class Use:
    """What the script does that no config says.

    `micro_batch` None takes the config's. `zero_init` says that the model is built under `zero.Init`, so that no rank
    ever holds the whole of it (Transformers' `from_pretrained` does so at stage 3).
    """

    micro_batch: int | None = None
    sequence: int | None = None
    attention: Literal["fused", "eager"] = "fused"
    checkpointing: bool = False
    zero_init: bool = False
    activations: Activations | None = None
    """Known from elsewhere (measured); None to work them out."""
    save_dir: str | None = None
    kept: int = 1
    """Checkpoints that are kept at the same time."""

    def workload(self, micro_batch: int, model: Inventory, *, parts: int = 1) -> Workload:
        """`parts` ranks share a sequence (Ulysses)."""
        return Workload(
            frozen=model.frozen > model.trainable,
            micro_batch=micro_batch,
            sequence=None if self.sequence is None else -(-self.sequence // parts),
            attention=self.attention,
            checkpointing=self.checkpointing,
        )


def estimate(
    config: Mapping[str, Any],
    model: ModelFacts | Inventory,
    machine: MachineFacts,
    *,
    nproc_per_node: int,
    nodes: int = 1,
    device: Literal["cpu", "cuda"],
    use: Use = Use(),
) -> MemoryFacts:
    """The needs of a model under a ds_config on `nodes` hosts like `machine`, `nproc_per_node` ranks on each."""
    inventory = of_facts(model) if isinstance(model, ModelFacts) else model
    inventory = split_experts(inventory, expert_parallel(config)) if inventory.expert_parallel == 1 else inventory
    ranks = nproc_per_node * nodes
    given = _setup(config, inventory, machine, use, ranks=ranks, ranks_per_host=nproc_per_node, device=device)
    room = _room(machine, device)
    needs = rows(given, config, room)
    chosen = recommended(needs)
    return MemoryFacts(
        needs=needs,
        device=device,
        parameters=inventory.all,
        trainable=inventory.trainable,
        model=_described(inventory),
        ranks=ranks,
        ranks_per_host=nproc_per_node,
        gpu_bytes=room.gpu,
        host_bytes=room.host,
        nvme_bytes=room.nvme,
        recommended=chosen,
        patch=None if chosen is None else needs[chosen].patch,
        terms=table(given),
        checkpoint=_checkpoint(given, machine, use),
        advice=advice.advise(given, config, room, fits=chosen is not None),
        assumptions=tuple(_assumptions(config, given, use, room)),
    )


def _setup(
    config: Mapping[str, Any],
    inventory: Inventory,
    machine: MachineFacts,
    use: Use,
    *,
    ranks: int,
    ranks_per_host: int,
    device: Literal["cpu", "cuda"],
) -> Setup:
    def made(work: Workload | None) -> Setup:
        return setup_of(
            config,
            inventory,
            release=machine.versions.get("deepspeed", ""),
            device=device,
            ranks=ranks,
            ranks_per_host=ranks_per_host,
            zero_init=use.zero_init or inventory.partitioned,
            measured=use.activations,
            work=work,
        )

    return made(
        use.workload(use.micro_batch or made(None).micro_batch or 1, inventory, parts=sequence_parallel(config))
    )


def _room(machine: MachineFacts, device: Literal["cpu", "cuda"]) -> Room:
    folders = [one.free_bytes for one in machine.swap_folders if one.free_bytes is not None]
    return Room(gpu=_gpu_bytes(machine, device), host=machine.host_available, nvme=min(folders, default=None))


def _gpu_bytes(machine: MachineFacts, device: Literal["cpu", "cuda"]) -> int | None:
    """What the smallest GPU has free; None where there is none or one is not known."""
    if device == "cpu" or not machine.devices:
        return None
    sizes = [one.free_bytes if one.free_bytes is not None else one.total_bytes for one in machine.devices]
    known = [size for size in sizes if size is not None]
    return min(known) if len(known) == len(sizes) else None


def _checkpoint(setup: Setup, machine: MachineFacts, use: Use) -> Checkpoint:
    """A full one: the weights, and masters and states of what is trained, whatever stage wrote it."""
    size = setup.weight * setup.model.all + (setup.master + setup.states) * setup.model.trainable
    if setup.gather_on_save and setup.stage == 3:
        size += setup.weight * setup.model.all
    free = next((one.free_bytes for one in machine.disks if one.path == use.save_dir), None)
    return Checkpoint(bytes=size, kept=use.kept, folder=use.save_dir, free=free)


def _described(inventory: Inventory) -> str:
    return f"{inventory.name} ({inventory.source})" if inventory.source else inventory.name


def _assumptions(config: Mapping[str, Any], setup: Setup, use: Use, room: Room) -> list[str]:
    said = [*setup.model.made_up, *_not_modelled(config)]
    if setup.activations.known:
        said.append(f"activations: {setup.activations.source}; other implementations of the model save other tensors")
    else:
        said.append("activations are not counted: their size is not known" + _what_would_tell(setup, use))
    if setup.zero_init:
        said.append("at stage 3 the script builds the model under zero.Init, so that no rank holds the whole of it")
    else:
        said.append("the script builds the whole model in every rank before DeepSpeed takes it (no zero.Init)")
    if not knows_optimizer(config):
        said.append("the optimizer is not in the config and counts as Adam: 8 bytes of state for a parameter")
    if setup.stage == 3 and setup.ranks > 1:
        said.append("stage 3 keeps as many parameters gathered as max_reuse_distance and max_live_parameters let it")
    if setup.device == "cpu":
        said.append("device memory is host memory here, so the needs of all ranks of a host add up")
    else:
        said.append(
            "1.5 GiB a GPU for CUDA and NCCL, 1 GiB of host memory a process; fragmentation is left to the margin"
        )
    if room.host is None:
        said.append("the host's memory is not known and not judged")
    if setup.pinned and setup.offload_optimizer != "none":
        said.append("each pinned buffer is rounded up to a power of two, as torch's allocator does")
    return said


_NOT_MODELLED = {
    ("tensor_parallel", "autotp_size"): "tensor parallelism",
    ("zero_optimization", "zenflow"): "ZenFlow",
    ("zero_optimization", "mics_shard_size"): "MiCS",
    ("zero_optimization", "zero_quantized_weights"): "quantized weights",
    ("pipeline", "stages"): "pipeline parallelism",
}


def _not_modelled(config: Mapping[str, Any]) -> Iterator[str]:
    """What the config switches on and the formulas do not know."""
    for (section, key), name in _NOT_MODELLED.items():
        part = config.get(section)
        value = part.get(key) if isinstance(part, Mapping) else None
        if value is True or value not in (None, False, 0, 1, -1, "auto"):
            yield f"{section}.{key}: {name} is not modelled; the figures are those without it"
    zero = config.get("zero_optimization")
    offload = zero.get("offload_optimizer") if isinstance(zero, Mapping) else None
    if isinstance(offload, Mapping) and offload.get("ratio") not in (None, 1, 1.0):
        yield "offload_optimizer.ratio: all optimizer states are taken to be offloaded"


def _what_would_tell(setup: Setup, use: Use) -> str:
    if setup.model.shape is None:
        return " without the shape of a decoder (--model with its config.json)"
    return " without --seq" if use.sequence is None else ""
