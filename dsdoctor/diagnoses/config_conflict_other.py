"""Options of the ds_config that exclude each other: elasticity, gradients, activations, compiler, data, schedules."""

from __future__ import annotations

from dsdoctor.diagnoses.config_conflict_entry import Conflict
from dsdoctor.dsconfig import batch
from dsdoctor.dsconfig.effective import Effective

_ZERO = "zero_optimization"
_CURRICULUM = "data_efficiency.data_sampling.curriculum_learning"
_DYNAMIC = "data_efficiency.data_sampling.dynamic_batching"
_SCHEDULES = ("fixed_linear", "fixed_root", "fixed_discrete", "custom")
_NEEDED_BY_SCHEDULES = {
    "WarmupDecayLR": ("total_num_steps",),
    "WarmupCosineLR": ("total_num_steps",),
    "OneCycle": ("cycle_min_lr", "cycle_max_lr"),
}
"""What the schedules of `deepspeed.runtime.lr_schedules` have no default for."""
_COMPRESSIONS = ("weight_quantization", "activation_quantization", "row_pruning", "head_pruning", "channel_pruning")
"""Sections of compression_training that name the layers they are for (sparse_pruning may do without)."""


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


def _schedule_without_length(config: Effective) -> bool:
    kind, given = config.get("scheduler.type"), config.get("scheduler.params")
    needed = _NEEDED_BY_SCHEDULES.get(kind, ()) if isinstance(kind, str) else ()
    return any(name not in (given if isinstance(given, dict) else {}) for name in needed)


def _schedule_of_torch(config: Effective) -> bool:
    """One of torch's schedules over the wrapper that ZeRO and 16-bit precision put around the optimizer."""
    kind, schema = config.get("scheduler.type"), config.schema
    of_torch = isinstance(kind, str) and kind in schema.torch_schedulers and kind not in schema.schedulers
    return of_torch and (config.stage > 0 or config.precision != "fp32")


def _two_tensor_sizes(config: Effective) -> bool:
    inner, size = config.get("tensor_parallel.tp.tp_size"), config.get("tensor_parallel.autotp_size")
    return isinstance(size, int) and size > 1 and inner not in (None, 1, size)


def _dropped_layers(config: Effective) -> bool:
    dropping = "data_efficiency.data_routing.random_ltd"
    on = config.get(f"{dropping}.enabled") is True
    named, count = config.get(f"{dropping}.random_ltd_layer_id"), config.get(f"{dropping}.random_ltd_layer_num")
    return on and isinstance(named, list) and isinstance(count, int) and len(named) != count


def _switched_on(config: Effective, section: str) -> bool:
    return config.get(f"{section}.enabled") is True


def _no_metrics(config: Effective) -> bool:
    return _switched_on(config, _CURRICULUM) and not isinstance(config.get(f"{_CURRICULUM}.curriculum_metrics"), dict)


def _unknown_schedule(config: Effective) -> bool:
    metrics = config.get(f"{_CURRICULUM}.curriculum_metrics")
    if not _switched_on(config, _CURRICULUM) or not isinstance(metrics, dict):
        return False
    schedules = [metric.get("schedule_type") for metric in metrics.values() if isinstance(metric, dict)]
    return any(schedule not in _SCHEDULES for schedule in schedules)


def _no_token_limit(config: Effective) -> bool:
    return _switched_on(config, _DYNAMIC) and config.get(f"{_DYNAMIC}.max_tokens") is None


def _nothing_to_compress(config: Effective) -> bool:
    sections = (f"compression_training.{name}" for name in _COMPRESSIONS)
    return any(
        _switched_on(config, f"{section}.shared_parameters") and not config.given(f"{section}.different_groups")
        for section in sections
    )


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
        keys=("scheduler.type", "scheduler.params"),
        holds=_schedule_without_length,
        cause="this schedule has no default for its length or limits (WarmupDecayLR and WarmupCosineLR: "
        "total_num_steps, OneCycle: cycle_min_lr and cycle_max_lr); its constructor raises",
        fix="give them in scheduler.params",
        message=r"missing \d+ required positional arguments?: '(?:total_num_steps|cycle_m\w+)'",
        caveat="Not if the script passes its own scheduler.",
    ),
    Conflict(
        keys=("scheduler.type",),
        holds=_schedule_of_torch,
        cause="a schedule of torch takes only an optimizer of torch; under ZeRO, and in fp16 and bf16 without it, "
        "DeepSpeed hands it a wrapper, and it raises a TypeError",
        fix="use a schedule of DeepSpeed's own (WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle), or have the script "
        "pass torch's to deepspeed.initialize: lr_scheduler=lambda optimizer: StepLR(optimizer, ...)",
        message=r"^TypeError: (?:DeepSpeedZeroOptimizer\w*|FP16_\w*Optimizer|BF16_Optimizer) is not an Optimizer",
        caveat="Not if the script passes its own scheduler.",
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
    Conflict(
        keys=(f"{_CURRICULUM}.enabled",),
        holds=_no_metrics,
        cause="curriculum learning is switched on without curriculum_metrics",
        fix="give the metrics, or switch it off",
        patch={"data_efficiency": {"data_sampling": {"curriculum_learning": {"enabled": False}}}},
        message="Curriculum learning is enabled, curriculum_metrics must be specified",
    ),
    Conflict(
        keys=(f"{_CURRICULUM}.curriculum_metrics",),
        holds=_unknown_schedule,
        cause=f"a metric of the curriculum has a schedule_type that is none of {', '.join(_SCHEDULES)}",
        fix="write one of them",
        message="Unsupported curriculum schedule type",
    ),
    Conflict(
        keys=(f"{_DYNAMIC}.enabled",),
        holds=_no_token_limit,
        cause="dynamic batching is switched on without max_tokens",
        fix="give max_tokens",
        message="Dynamic batching is enabled, so max_tokens must be specified",
        since="0.16.9",
    ),
    Conflict(
        keys=("compression_training",),
        holds=_nothing_to_compress,
        cause="a kind of compression is switched on without different_groups, which name the layers that it is for",
        fix="give different_groups, or switch it off",
        message="is enabled, different_groups must be specified",
        until="0.19.6",
    ),
)
