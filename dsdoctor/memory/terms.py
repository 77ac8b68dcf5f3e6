"""The memory formulas for what stays: one function a term, each takes a `Setup` and returns bytes of one rank.

Sources are DeepSpeed 0.19's `runtime/zero/stage_1_and_2.py`, `stage3.py`, `bf16_optimizer.py` and `fp16/`. Symbols are
those of `memory.setup`; what comes and goes within a step is in `memory.moments`. Held to real engines by
`tests/benchmarks/bench_memory.py` and `tests/memory/test_real_deepspeed.py`.
"""

from __future__ import annotations

from dsdoctor.memory.setup import Setup

CUDA_CONTEXT = 1536 << 20
"""Context, kernels and NCCL's buffers on one GPU: 1 to 1.5 GB by experience (assumed)."""
CPU_PROCESS = 400 << 20
"""Resident size of a process that has imported torch and DeepSpeed (0.25 GB), with a data pipeline (assumed)."""
CUDA_PROCESS = 1 << 30
"""The same with the driver's host-side memory (assumed)."""


def weights(setup: Setup) -> int:
    """Parameters on the device: in full below stage 3, there a shard and the small ones in full.

    At stage 3 each parameter is cut by itself (`partition_parameters.py`), and one up to the persistence threshold
    stays whole once it has been gathered, beside its shard (`parameter_offload.py`, `mark_persistent_parameters`).
    """
    if setup.stage < 3:
        return setup.weight * setup.model.all
    shard = setup.weight * setup.weight_shard if setup.offload_param == "none" else 0
    return shard + persistent(setup)


def persistent(setup: Setup) -> int:
    """What of `weights` is kept whole at stage 3. A single rank's shard is the whole."""
    if setup.stage < 3 or setup.ranks == 1:
        return 0
    return setup.weight * setup.model.persistent(setup.persistence, setup.model_persistence)


def gradients(setup: Setup) -> int:
    """Gradients that stay on the device from the end of backward to the step.

    Stage 3 has one flat buffer for its part all the time (`grad_partitions_flat_buffer`), BF16_Optimizer one of the
    whole model (`fp32_groups_gradients_flat`) besides the 16-bit gradients.
    """
    trained = setup.model.trainable
    if setup.full_accumulation:
        return setup.accumulated * trained
    if setup.stage == 0:
        return setup.weight * trained
    return 0 if setup.offload_optimizer != "none" else setup.accumulated * setup.trained_shard


def master(setup: Setup) -> int:
    """Master parameters on the device."""
    return 0 if setup.offload_optimizer != "none" else setup.master * setup.trained_shard


def states(setup: Setup) -> int:
    """Optimizer states on the device. Under ZeRO they are made in the first step (lazily, since 0.14)."""
    return 0 if setup.offload_optimizer != "none" else setup.states * setup.trained_shard


def bucket(setup: Setup) -> int:
    """The buffer that gradients are gathered in before they are reduced, whatever the model's size is.

    `setup_buckets` makes it at the first gradient of a step at stages 1 and 2 (two with overlap_comm), stage 3 keeps
    one for ever. Stage 0 and BF16_Optimizer have none. Measured on a small model it is nearly all of the memory.
    """
    if setup.stage == 0 or setup.full_accumulation:
        return 0
    doubled = 2 if setup.overlap and setup.stage < 3 else 1
    size = setup.accumulated if setup.stage == 1 and setup.accumulated != setup.weight else setup.weight
    elements = setup.reduce_bucket if setup.untouched else min(setup.reduce_bucket, setup.model.trainable)
    return size * elements * doubled


def secondary(setup: Setup) -> int:
    """hpZ: a second shard within the host, held from forward to step (`ds_secondary_tensor`)."""
    if setup.stage < 3 or setup.hpz <= 1:
        return 0
    return setup.weight * setup.model.shard(setup.hpz)


def staging(setup: Setup) -> int:
    """Stages 1 and 2 with CPU offload: one gradient of the largest parameter (`temp_grad_buffer_for_gpu_offload`)."""
    if setup.offload_optimizer == "none" or setup.stage not in (1, 2):
        return 0
    return setup.weight * setup.model.largest_parameter


def overhead(setup: Setup) -> int:
    """What is there without a model: on a GPU the context and NCCL, on the CPU the process."""
    return CUDA_CONTEXT if setup.device == "cuda" else CPU_PROCESS
