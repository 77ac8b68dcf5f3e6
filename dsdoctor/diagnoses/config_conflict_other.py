"""Options of the ds_config that exclude each other: elasticity, gradients, activations, compiler, data, schedules."""

from __future__ import annotations

from dsdoctor.diagnoses.config_conflict_entry import Conflict
from dsdoctor.dsconfig import batch
from dsdoctor.dsconfig.effective import Effective

_ZERO = "zero_optimization"


def _prescaled(config: Effective) -> bool:
    scaled = config.get("prescale_gradients") is True or config.get("gradient_predivide_factor") not in (None, 1, 1.0)
    return config.stage >= 2 and config.get(f"{_ZERO}.reduce_scatter") is True and scaled


def _sums(config: Effective) -> bool:
    other = config.stage == 3 or config.given(f"{_ZERO}.zenflow") or config.get("compile.deepcompile") is True
    return str(config.get("gradient_allreduce_op")).lower() == "sum" and other


def _elastic(config: Effective) -> bool:
    """Elastic training works the batch sizes out, and wants none given by hand beside it."""
    section = config.data.get("elasticity")
    if not isinstance(section, dict) or section.get("enabled") is not True:
        return False
    by_hand = any(key in config.data for key in batch.KEYS)
    return by_hand and section.get("ignore_non_elastic_batch_info") is not True


def _contiguous_activations(config: Effective) -> bool:
    section = "activation_checkpointing"
    ready = config.get(f"{section}.partition_activations") is True
    ready = ready and config.get(f"{section}.number_checkpoints") is not None
    return config.get(f"{section}.contiguous_memory_optimization") is True and not ready


def _own_boundary(config: Effective) -> bool:
    overlaps = config.stage == 1 and config.get(f"{_ZERO}.overlap_comm") is True
    return config.get("managed_gradient_accumulation") is False and (overlaps or _deepcompile(config))


def _deepcompile(config: Effective) -> bool:
    return config.get("compile.deepcompile") is True


def _both_compile_offloads(config: Effective) -> bool:
    others = ("compile.offload_parameters", "compile.offload_opt_states")
    activation = config.get("compile.offload_activation") is True
    return _deepcompile(config) and config.stage == 3 and activation and any(config.get(o) is True for o in others)


def _no_warmup(config: Effective) -> bool:
    steps = config.get("scheduler.params.warmup_num_steps")
    warms = config.get("scheduler.type") in ("WarmupLR", "WarmupDecayLR")
    return warms and isinstance(steps, (int, float)) and (isinstance(steps, float) or steps <= 0)


def _two_tensor_sizes(config: Effective) -> bool:
    inner, size = config.get("tensor_parallel.tp.tp_size"), config.get("tensor_parallel.autotp_size")
    return isinstance(size, int) and size > 1 and inner not in (None, 1, size)


def _dropped_layers(config: Effective) -> bool:
    dropping = "data_efficiency.data_routing.random_ltd"
    on = config.get(f"{dropping}.enabled") is True
    named, count = config.get(f"{dropping}.random_ltd_layer_id"), config.get(f"{dropping}.random_ltd_layer_num")
    return on and isinstance(named, list) and isinstance(count, int) and len(named) != count


CONFLICTS: tuple[Conflict, ...] = (
    Conflict(
        keys=("elasticity.enabled", *batch.KEYS),
        holds=_elastic,
        cause="elastic training works the batch sizes out and refuses those given by hand",
        fix="drop the batch sizes, or set ignore_non_elastic_batch_info",
        patch=dict.fromkeys(batch.KEYS),
        message="ElasticityConfigError",
        until="0.19.7",
    ),
    Conflict(
        keys=("prescale_gradients", "gradient_predivide_factor", f"{_ZERO}.reduce_scatter"),
        holds=_prescaled,
        cause="ZeRO stage 2 and 3 take no prescaled or predivided gradients while reduce_scatter is on",
        fix="drop prescale_gradients and gradient_predivide_factor",
        patch={"prescale_gradients": None, "gradient_predivide_factor": None},
        message=r"pre-scale gradients is not yet supported|gradient_predivide_factor != 1\.0 is not yet supported",
    ),
    Conflict(
        keys=("gradient_allreduce_op",),
        holds=_sums,
        cause="gradient_allreduce_op sum works neither at stage 3 nor with ZenFlow or DeepCompile",
        fix="use mean",
        patch={"gradient_allreduce_op": None},
        message=r"gradient_allreduce_op='sum' is not supported",
        since="0.19.6",
    ),
    Conflict(
        keys=("activation_checkpointing.contiguous_memory_optimization",),
        holds=_contiguous_activations,
        cause="contiguous_memory_optimization needs partition_activations and number_checkpoints",
        fix="give both, or drop contiguous_memory_optimization",
        patch={"activation_checkpointing": {"contiguous_memory_optimization": None}},
        message=r"Contiguous Checkpointing is only available|Must specify the number of layers with contiguous",
        severity="info",
        caveat="It matters only if the script uses deepspeed.checkpointing.",
    ),
    Conflict(
        keys=("managed_gradient_accumulation",),
        holds=_own_boundary,
        cause="managed_gradient_accumulation false goes neither with overlap_comm at stage 1 nor with DeepCompile",
        fix="switch overlap_comm or DeepCompile off",
        message="managed_gradient_accumulation=False",
        since="0.19.4",
    ),
    Conflict(
        keys=("compile.offload_activation", "compile.offload_parameters", "compile.offload_opt_states"),
        holds=_both_compile_offloads,
        cause="DeepCompile offloads either activations, or parameters and optimizer states",
        fix="switch offload_activation off",
        patch={"compile": {"offload_activation": None}},
        message=r"compile\.offload_activation cannot be combined",
        since="0.19.5",
    ),
    Conflict(
        keys=("scheduler.params.warmup_num_steps",),
        holds=_no_warmup,
        cause="the warm-up schedules take only a whole number of steps above 0",
        fix="write 1 for no warm-up",
        patch={"scheduler": {"params": {"warmup_num_steps": 1}}},
        message="warmup_num_steps must be a positive integer",
        since="0.19.6",
    ),
    Conflict(
        keys=("tensor_parallel.tp.tp_size", "tensor_parallel.autotp_size"),
        holds=_two_tensor_sizes,
        cause="tensor_parallel gives two sizes, autotp_size and tp.tp_size, and they differ",
        fix="drop tp.tp_size",
        patch={"tensor_parallel": {"tp": None}},
        message=r"tensor_parallel\.tp\.tp_size .* does not match",
        since="0.19.2",
    ),
    Conflict(
        keys=("data_efficiency.data_routing.random_ltd.random_ltd_layer_num",),
        holds=_dropped_layers,
        cause="random_ltd_layer_num is not the number of layers in random_ltd_layer_id",
        fix="write the number of layers that random_ltd_layer_id names",
        message="random_ltd_layer_num .* must be",
    ),
)
