"""What a row costs beside memory: bytes over the network, PCIe and the disk in one optimizer step, and the time.

Volumes follow from DeepSpeed's collectives; the rates are assumptions about common machines, which only serve to put
the rows into an order and to say roughly how much slower one is.
"""

from __future__ import annotations

from dsdoctor.memory.facts import Cost
from dsdoctor.memory.setup import Setup

WITHIN_HOST = 150e9
"""Bytes a second and rank over NVLink (assumed)."""
BETWEEN_HOSTS = 25e9
"""Bytes a second and rank between hosts: 200 Gbit/s (assumed)."""
PCIE = 20e9
"""Bytes a second and GPU between it and the host (assumed)."""
DISK = 5e9
"""Bytes a second of one host's NVMe (assumed)."""
FLOPS = 140e12
"""Operations a second of one GPU in 16 bit: 45 % of an A100's peak (assumed); half of that in fp32."""
CPU_ADAM = 2e9
"""Parameters a second that the CPUs of one host update (assumed)."""
TYPICAL_TOKENS = 2048
"""Tokens of a micro-step where nobody says."""


def cost(setup: Setup) -> Cost:
    """The cost of one optimizer step, nothing of it overlapped."""
    network, pcie, disk = _network(setup), _pcie(setup), _disk(setup)
    rate = WITHIN_HOST if setup.ranks <= setup.ranks_per_host else BETWEEN_HOSTS
    seconds = _computing(setup, setup.work.tokens or TYPICAL_TOKENS) + network / rate + pcie / PCIE
    seconds += disk * setup.ranks_per_host / DISK
    if setup.offload_optimizer != "none":
        seconds += setup.trained_shard * setup.ranks_per_host / CPU_ADAM
    return Cost(network=network, pcie=pcie, disk=disk, seconds=round(seconds, 6))


def _computing(setup: Setup, tokens: int) -> float:
    """Six operations for a trained parameter and token, four for a frozen one."""
    model = setup.model
    active = 1.0 if model.shape is None else model.shape.active
    weighted = 6 * model.trainable + 4 * model.frozen - 6 * (1 - active) * model.experts
    return setup.accumulation_steps * tokens * weighted / (FLOPS if setup.low_precision else FLOPS / 2)


def _network(setup: Setup) -> int:
    """Bytes that a rank sends: gradients are reduced, then the updated weights gathered.

    Stages 0 and 1 do so at the boundary, stage 2 reduces in each micro-step, stage 3 gathers all weights twice in each
    (frozen ones too); with hpZ the second time within the host.
    """
    share = (setup.ranks - 1) / setup.ranks
    trained, whole = setup.weight * setup.model.trainable, setup.weight * setup.model.all
    if setup.stage < 2:
        return round(share * 2 * trained)
    if setup.stage == 2:
        return round(share * (setup.accumulation_steps + 1) * trained)
    gathers = 1 if setup.hpz > 1 else 2
    return round(share * setup.accumulation_steps * (gathers * whole + trained))


def _pcie(setup: Setup) -> int:
    """Bytes between one GPU and its host: gradients down, weights up; parameters for every gather."""
    moved = 0
    if setup.offload_optimizer != "none":
        moved += ((4 if setup.stage < 3 else setup.accumulated) + setup.weight) * setup.trained_shard
    if setup.offload_param != "none":
        moved += 2 * setup.accumulation_steps * setup.weight * setup.weight_shard
    return moved


def _disk(setup: Setup) -> int:
    """Bytes that one rank reads and writes: masters, states and gradients both ways, parameters for every gather."""
    moved = 0
    if setup.offload_optimizer == "nvme":
        moved += 2 * (setup.master + setup.states) * setup.trained_shard + setup.master * setup.trained_shard
    if setup.offload_param == "nvme":
        moved += (2 * setup.accumulation_steps + 1) * setup.weight * setup.weight_shard
    return moved
