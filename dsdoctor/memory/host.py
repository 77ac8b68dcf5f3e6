"""The memory formulas for the host: what offloading keeps there, for all ranks of one host together. Bytes.

Pinned memory comes in blocks whose size is a power of two (torch's caching host allocator), so the flat buffers are
rounded up; the CPU accelerator pins nothing.
"""

from __future__ import annotations

from dsdoctor.memory import moments
from dsdoctor.memory.facts import Holding, Moment
from dsdoctor.memory.setup import Setup
from dsdoctor.memory.terms import CPU_PROCESS, CUDA_PROCESS, bucket

CONSTRUCTION = "loading the model"


def host_moments(setup: Setup) -> tuple[Moment, ...]:
    """What all ranks of one host hold there, from building the model to saving it.

    On the CPU accelerator that includes what would be on the devices.
    """
    before = Moment(name=CONSTRUCTION, holding=_loading(setup))
    return (before, *(_with_device(setup, one) for one in moments.device_moments(setup)))


def _loading(setup: Setup) -> Holding:
    """Every rank builds the whole model in the dtype of its files, except under zero.Init, which keeps one module.

    It is cast one parameter after the other, so that the largest is there twice.
    """
    whole = setup.model.loaded + (setup.weight * setup.model.largest if setup.low_precision else 0)
    if setup.built_in_shards:
        whole = round(whole * (1 / setup.ranks + setup.model.largest_module / max(1, setup.model.all)))
    return Holding(weights=setup.ranks_per_host * whole, overhead=_processes(setup))


def _with_device(setup: Setup, moment: Moment) -> Moment:
    own = _holding(setup, moment.name)
    if setup.device == "cuda":
        return Moment(name=moment.name, holding=own)
    there = moment.holding
    each = {
        name: setup.ranks_per_host * getattr(there, name)
        for name in ("weights", "gradients", "optimizer", "buffers", "activations")
    }
    return Moment(name=moment.name, holding=own.plus(**each))


def _holding(setup: Setup, moment: str) -> Holding:
    """What offloading, serializing and the processes themselves take on the host at a moment."""
    overhead = _processes(setup)
    if moment == moments.PARTITION:
        whole = setup.ranks_per_host * setup.weight * setup.model.all if setup.device == "cuda" else 0
        return Holding(weights=0 if setup.built_in_shards else whole, overhead=overhead)
    states_there = moment not in (moments.INITIALIZE, moments.FIRST_BACKWARD)
    return held(setup, with_states=states_there).plus(buffers=_passing(setup, moment))


def held(setup: Setup, *, with_states: bool = True) -> Holding:
    """What offloading keeps on the host between two steps, and the processes."""
    return Holding(
        weights=weights(setup),
        gradients=gradients(setup),
        optimizer=master(setup) + (states(setup) if with_states else 0),
        buffers=buffers(setup),
        overhead=_processes(setup),
    )


def _passing(setup: Setup, moment: str) -> int:
    """What only that moment needs."""
    if moment == moments.INITIALIZE:
        if setup.stage < 3:
            return -_waiting(setup)
        later = setup.accumulated * setup.trained_shard
        later += bucket(setup) + moments.extra_at_init(setup) if setup.device == "cpu" else 0
        return max(0, initial(setup) - setup.ranks_per_host * later)
    if moment in (moments.STEP, moments.FIRST_STEP):
        return step_temporaries(setup)
    if setup.device == "cuda" and moment == moments.SAVE and setup.offload_optimizer == "none":
        return _serialized(setup)
    if moment == moments.CONSOLIDATE and setup.stage == 3 and setup.gather_on_save:
        return setup.weight * setup.model.all
    return 0


def _serialized(setup: Setup) -> int:
    """torch.save copies one tensor after the other to the host: flat masters at most; at stage 0 one rank writes."""
    size = setup.master or setup.weight
    if setup.stage == 0:
        return size * (setup.model.trainable if setup.fused and setup.low_precision else setup.model.largest_parameter)
    return setup.ranks_per_host * size * setup.stepped_at_a_time


def _processes(setup: Setup) -> int:
    return setup.ranks_per_host * (CPU_PROCESS if setup.device == "cpu" else CUDA_PROCESS)


def weights(setup: Setup) -> int:
    """Shards that `offload_param` keeps: one pinned block a rank, whatever `pin_memory` says.

    Source: `_create_param_groups_fp16_flat_cpu_memory`. With NVMe up to `max_in_cpu` elements stay here. Frozen
    parameters are in no group and keep a block each.
    """
    if setup.offload_param == "none":
        return 0
    trained = setup.trained_shard
    if setup.offload_param == "nvme":
        return setup.ranks_per_host * block(setup, setup.weight * min(setup.max_in_cpu, trained), pinned=True)
    frozen = setup.weight * (setup.weight_shard - trained)
    return setup.ranks_per_host * (block(setup, setup.weight * trained, pinned=True) + frozen)


def gradients(setup: Setup) -> int:
    """Stages 1 and 2: an fp32 gradient, and with accumulation 16-bit ones of every parameter that a rank has part in.

    Stage 3: fp32 (in low precision with low-precision masters) for the sub-groups, and the flat buffer.
    """
    if setup.offload_optimizer == "none":
        return 0
    shard = setup.trained_shard
    flat = block(setup, setup.accumulated * shard, pinned=setup.pinned) if setup.stage == 3 else 0
    if setup.offload_optimizer == "nvme":
        return setup.ranks_per_host * flat
    rank = block(setup, setup.master * shard, pinned=setup.pinned) + flat
    return setup.ranks_per_host * rank + _waiting(setup)


def _waiting(setup: Setup) -> int:
    """Stages 1 and 2: 16-bit gradients that wait on the host for the boundary, made in the first micro-step."""
    if setup.stage == 3 or setup.offload_optimizer == "none" or setup.low_master or setup.accumulation_steps == 1:
        return 0
    return setup.ranks_per_host * setup.weight * setup.trained_shard


def master(setup: Setup) -> int:
    """Master parameters; pinned at stages 1 and 2 only."""
    if setup.offload_optimizer != "cpu":
        return 0
    size = setup.master * setup.trained_shard
    return setup.ranks_per_host * block(setup, size, pinned=setup.pinned and setup.stage < 3)


def states(setup: Setup) -> int:
    """Optimizer states of a CPU offload, in pageable memory."""
    return setup.ranks_per_host * setup.states * setup.trained_shard if setup.offload_optimizer == "cpu" else 0


def buffers(setup: Setup) -> int:
    """Staging: stages 1 and 2 a 16-bit copy of the shard and a gradient of the largest parameter; NVMe its buffers.

    NVMe: `buffer_count` buffers of the largest optimizer tensor (`optimizer_utils.py`), and `buffer_count` of
    `buffer_size` elements for parameters (`partitioned_param_swapper.py`), pinned.
    """
    rank = 0
    if setup.offload_optimizer == "cpu" and setup.stage < 3:
        rank += block(setup, setup.weight * setup.trained_shard, pinned=setup.pinned)
        rank += block(setup, setup.weight * setup.model.largest_parameter, pinned=setup.pinned)
    if setup.offload_optimizer == "nvme":
        largest = setup.master * setup.stepped_at_a_time
        rank += setup.buffer_count_optimizer * block(setup, largest, pinned=True)
    if setup.offload_param == "nvme":
        rank += block(setup, setup.buffer_count_param * setup.param_buffer * setup.weight, pinned=True)
    return setup.ranks_per_host * rank


def initial(setup: Setup) -> int:
    """Stage 3 with CPU offload: the first gradient of one sub-group, made twice while the optimizer is built."""
    if setup.offload_optimizer == "none" or setup.stage < 3:
        return 0
    return setup.ranks_per_host * setup.master * setup.stepped_at_a_time


def step_temporaries(setup: Setup) -> int:
    """What an Adam of torch's needs beside its states when it works on the host."""
    if setup.offload_optimizer != "cpu":
        return 0
    part = setup.stepped_at_a_time
    return setup.ranks_per_host * setup.temporaries * setup.master * part


def nvme(setup: Setup) -> int:
    """Bytes on one host's NVMe: masters, states and gradients, and the parameters, of its ranks."""
    shard = setup.trained_shard
    rank = (2 * setup.master + setup.states) * shard if setup.offload_optimizer == "nvme" else 0
    if setup.offload_param == "nvme":
        rank += setup.weight * max(0, setup.weight_shard - setup.max_in_cpu)
    return setup.ranks_per_host * rank


def block(setup: Setup, size: int, *, pinned: bool) -> int:
    """One allocation of host memory: pinned ones are rounded up to a power of two; there are none without CUDA."""
    if not pinned or setup.device == "cpu" or size == 0:
        return size
    return 1 << (size - 1).bit_length()
