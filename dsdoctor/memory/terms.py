"""The memory formulas, one function a term. All take a `Setup` and return bytes.

Sources are DeepSpeed 0.19's `runtime/zero/stage_1_and_2.py` and `stage3.py`, checked against live tensors counted on
two ranks: bytes for a parameter after init, backward and step of every stage. Symbols: `memory.setup`.
"""

from __future__ import annotations

from dsdoctor.memory.setup import Setup

CUDA_CONTEXT = 1536 << 20
"""Context, kernels and NCCL's buffers on one GPU: 1 to 1.5 GB by experience."""
CPU_PROCESS = 400 << 20
"""Resident size of a process that has imported torch and DeepSpeed (0.25 GB), with a data pipeline."""
CUDA_PROCESS = 1 << 30
"""The same with the driver's host-side memory."""
_ALLREDUCE_BUCKET = 500_000_000
"""Elements that the engine flattens at a time at stage 0 (`DeepSpeedEngine.buffered_allreduce_fallback`)."""


def weights(setup: Setup) -> int:
    """Parameters on the device: in full below stage 3, a shard at stage 3, none with `offload_param`."""
    if setup.offload_param != "none":
        return 0
    full = setup.weight * setup.all_parameters
    return full if setup.stage < 3 else _share(setup, full)


def gradients(setup: Setup) -> int:
    """Gradients that stay on the device from the end of backward to the step."""
    if setup.full_accumulation:
        return (setup.weight + setup.accumulated) * setup.trainable
    if setup.stage == 0:
        return setup.weight * setup.trainable
    return 0 if setup.offload_optimizer != "none" else _share(setup, setup.accumulated * setup.trainable)


def optimizer(setup: Setup) -> int:
    """Master parameters and optimizer states on the device. The states are made in the first step."""
    if setup.offload_optimizer != "none":
        return 0
    full = (setup.master + setup.states) * setup.trainable
    return full if setup.stage == 0 else _share(setup, full)


def buffers(setup: Setup) -> int:
    """Reduction buckets. From stage 1 on they have their size whatever the model's is (`torch.empty`).

    On the CPU a page that was never written takes no memory, so there they count up to the gradients' size.
    """
    if setup.stage == 0:
        return setup.weight * min(setup.trainable, _ALLREDUCE_BUCKET)
    bucket = setup.reduce_bucket
    if setup.device == "cpu":
        bucket = min(bucket, setup.trainable)
    doubled = 2 if setup.overlap and setup.stage < 3 else 1
    return setup.weight * bucket * doubled


def full_gradients(setup: Setup) -> int:
    """What backward holds besides `gradients`: all of them at stage 1, until the boundary; at stage 2 one layer's."""
    if setup.stage == 1:
        return 0 if setup.full_accumulation else setup.weight * setup.trainable
    return setup.weight * min(setup.largest_layer, setup.trainable) if setup.stage == 2 else 0


def gathered(setup: Setup) -> int:
    """Stage 3: parameters that are whole for the layer at work, and those fetched ahead."""
    if setup.stage < 3:
        return 0
    return setup.weight * min(setup.all_parameters, setup.largest_layer + setup.prefetch)


def step_gradients(setup: Setup) -> int:
    """fp32 gradients of the parameter group (stage 3: sub-group) that the optimizer is working on."""
    if setup.offload_optimizer != "none":
        return 0
    if setup.stage == 0:
        return 4 * setup.trainable if setup.low_precision else 0
    part = -(-setup.trainable // setup.ranks)
    return 4 * (min(setup.sub_group, part) if setup.stage == 3 else part)


def initial_weights(setup: Setup) -> int:
    """What init holds on the device: stage 1/2 flattens a copy, stage 3 moves the whole model there and cuts it."""
    full = setup.weight * setup.all_parameters
    if setup.stage in (1, 2):
        return full + setup.weight * setup.trainable
    return full


def host_weights(setup: Setup) -> int:
    """Shards that `offload_param` keeps on the host; one pinned block a rank, whatever `pin_memory` says."""
    if setup.offload_param != "cpu":
        return 0
    return setup.ranks_per_host * _block(setup, _share(setup, setup.weight * setup.all_parameters), pinned=True)


def host_gradients(setup: Setup) -> int:
    """Stage 1/2: an fp32 gradient, and with accumulation the 16-bit ones; stage 3: fp32 and the flat buffer."""
    if setup.offload_optimizer == "none":
        return 0
    share = _share(setup, setup.trainable)
    rank = _block(setup, 4 * share, pinned=setup.pinned)
    if setup.stage == 3:
        rank += _block(setup, setup.accumulated * share, pinned=setup.pinned)
    elif setup.accumulation_steps > 1:
        rank += setup.weight * share
    return setup.ranks_per_host * rank


def host_optimizer(setup: Setup) -> int:
    """Master parameters and optimizer states of a CPU offload."""
    if setup.offload_optimizer != "cpu":
        return 0
    share = _share(setup, setup.trainable)
    master = _block(setup, setup.master * share, pinned=setup.pinned and setup.stage < 3)
    return setup.ranks_per_host * (master + setup.states * share)


def host_buffers(setup: Setup) -> int:
    """Staging: stage 1/2 a 16-bit copy of the shard and two of the largest parameter; NVMe its swap buffers."""
    if setup.offload_optimizer == "none" and setup.offload_param != "nvme":
        return 0
    rank = 0
    if setup.offload_optimizer == "cpu" and setup.stage < 3:
        rank += _block(setup, _share(setup, setup.weight * setup.trainable), pinned=setup.pinned)
        rank += 2 * setup.weight * setup.largest_layer
    if setup.offload_optimizer == "nvme":
        rank += 4 * 4 * min(setup.sub_group, _share(setup, setup.trainable))
    if setup.offload_param == "nvme":
        rank += 5 * 100_000_000 * setup.weight
    return setup.ranks_per_host * rank


def nvme(setup: Setup) -> int:
    """Bytes on one host's NVMe: masters, states and gradients, and the parameters, of its ranks."""
    share = _share(setup, setup.trainable)
    rank = (setup.master + setup.states + 4) * share if setup.offload_optimizer == "nvme" else 0
    if setup.offload_param == "nvme":
        rank += _share(setup, setup.weight * setup.all_parameters)
    return setup.ranks_per_host * rank


def _share(setup: Setup, whole: int) -> int:
    """One rank's part, rounded up."""
    return -(-whole // setup.ranks)


def _block(setup: Setup, size: int, *, pinned: bool) -> int:
    """torch's allocator of pinned memory rounds every block up to a power of two; there is none without CUDA."""
    if not pinned or setup.device == "cpu" or size == 0:
        return size
    return 1 << (size - 1).bit_length()
