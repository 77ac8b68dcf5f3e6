"""The table of options in a ds_config that exclude each other; `config_conflict` is the rule over it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dsdoctor.dsconfig import batch
from dsdoctor.dsconfig.effective import Effective
from dsdoctor.dsconfig.release import at_least
from dsdoctor.finding import Severity

_ZERO = "zero_optimization"
_OLD_KEYS = ("cpu_offload", "cpu_offload_param", "stage3_gather_fp16_weights_on_model_save")
_COMM = "communication_data_type"
_SPELLED = {
    "fp16": ("fp16", "float16", "half", "torch.float16"),
    "bf16": ("bf16", "bfloat16", "torch.bfloat16"),
    "fp32": ("fp32", "float32", "float", "torch.float32"),
}


@dataclass(frozen=True, kw_only=True)
class Conflict:
    """Options that do not go together.

    `holds` looks at the config as DeepSpeed understands it; `message` is a pattern of the exception that DeepSpeed
    raises for it, None where it raises none. Of `calls` the script has to make one, if there are any. `since` and
    `until` are DeepSpeed releases, both included.
    """

    keys: tuple[str, ...]
    holds: Callable[[Effective], bool]
    cause: str
    fix: str
    patch: dict[str, Any] | None = None
    calls: tuple[str, ...] = ()
    message: str | None = None
    severity: Severity = "error"
    since: str | None = None
    until: str | None = None
    caveat: str | None = None


def _narrow_reduction(config: Effective) -> bool:
    """Gradients of a bf16 or fp32 run are reduced in fp16, whose range ends at 65504."""
    return config.given(_COMM) and str(config.get(_COMM)).lower() == "fp16" and config.precision != "fp16"


def _accumulates_otherwise(config: Effective) -> bool:
    wanted = config.get("data_types.grad_accum_dtype")
    return config.stage == 0 and wanted in ("fp16", "bf16", "fp32") and wanted != config.precision


def _cast_otherwise(config: Effective) -> bool:
    wanted = config.get("data_types.param_dtype")
    return isinstance(wanted, str) and wanted not in _SPELLED[config.precision]


def _masters_without_cpu(config: Effective) -> bool:
    fp16 = config.precision == "fp16" and config.get("fp16.fp16_master_weights_and_grads") is True
    bf16 = config.precision == "bf16" and config.get("bf16.bf16_master_weights_and_grads") is True
    bf16 = bf16 and config.get("bf16.bf16_optimizer_states") is not True
    return config.stage > 0 and (fp16 or bf16) and config.offload("optimizer") == "none"


def _masters_beside_stage_2(config: Effective) -> bool:
    """Up to 0.17.0 the key was read with fp16 switched on only."""
    read = config.precision == "fp16" or at_least(config.schema.release, "0.17.5")
    return config.stage != 2 and read and bool(config.get("fp16.fp16_master_weights_and_grads"))


def _prescaled(config: Effective) -> bool:
    scaled = config.get("prescale_gradients") is True or config.get("gradient_predivide_factor") not in (None, 1, 1.0)
    return config.stage >= 2 and config.get(f"{_ZERO}.reduce_scatter") is True and scaled


def _both_spellings(config: Effective) -> bool:
    zero = config.data.get(_ZERO)
    gathers = "gather_16bit_weights_on_model_save"
    pairs = (
        ("cpu_offload", "offload_optimizer"),
        ("cpu_offload_param", "offload_param"),
        ("stage3_gather_fp16_weights_on_model_save", gathers),
        ("stage3_gather_fp16_weights_on_model_save", f"stage3_{gathers}"),
    )
    return isinstance(zero, dict) and any(old in zero and new in zero for old, new in pairs)


def _partial_offload(config: Effective) -> bool:
    ratio = config.get(f"{_ZERO}.offload_optimizer.ratio")
    return isinstance(ratio, (int, float)) and ratio < 1 and config.stage != 3


def _sums(config: Effective) -> bool:
    other = config.stage == 3 or config.given(f"{_ZERO}.zenflow") or config.get("compile.deepcompile") is True
    return str(config.get("gradient_allreduce_op")).lower() == "sum" and other


def _no_norm(config: Effective) -> bool:
    if config.get(f"{_ZERO}.compute_grad_norm") is not False:
        return False
    clips = config.get("gradient_clipping") not in (0, 0.0, None)
    return config.stage not in (1, 2) or clips or config.offload("optimizer") != "none"


def _muon_scatters(config: Effective) -> bool:
    return config.optimizer == "muon" and config.stage == 3 and config.get(f"{_ZERO}.reduce_scatter") is True


def _muon_offloads(config: Effective) -> bool:
    scatters = config.get(f"{_ZERO}.reduce_scatter") is True
    return config.optimizer == "muon" and config.stage in (1, 2) and scatters and config.offload("optimizer") != "none"


def _odd_bucket(config: Effective) -> bool:
    size = config.get(f"{_ZERO}.allgather_bucket_size")
    return config.stage in (1, 2) and isinstance(size, int) and size % 2 == 1


def _lamb_static(config: Effective) -> bool:
    static = config.precision != "fp16" or config.get("fp16.loss_scale") != 0
    return config.optimizer == "lamb" and static


def _no_window(config: Effective) -> bool:
    values = [config.get("fp16.loss_scale_window")]
    if at_least(config.schema.release, "0.19.3"):  # older ones let the scale fall below any floor
        values.append(config.get("fp16.min_loss_scale"))
    dynamic = config.precision == "fp16" and config.get("fp16.loss_scale") == 0
    return dynamic and any(isinstance(value, (int, float)) and value <= 0 for value in values)


def _elastic(config: Effective) -> bool:
    """Elastic training works the batch sizes out; it wants its own limits, and none given by hand beside them."""
    section = config.data.get("elasticity")
    if not isinstance(section, dict) or section.get("enabled") is not True:
        return False
    limits = "max_train_batch_size" in section and "micro_batch_sizes" in section
    by_hand = any(key in config.data for key in batch.KEYS) and section.get("ignore_non_elastic_batch_info") is not True
    return not limits or by_hand


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


def _not_in_config(_config: Effective) -> bool:
    """The other half of the conflict is the script's; only DeepSpeed's exception shows it."""
    return False


CONFLICTS: tuple[Conflict, ...] = (
    Conflict(
        keys=("elasticity.enabled",),
        holds=_elastic,
        cause="elastic training needs max_train_batch_size and micro_batch_sizes, and no batch sizes beside them",
        fix="give both limits and drop the batch sizes, or set ignore_non_elastic_batch_info",
        patch={"elasticity": {"enabled": False}},
        message="ElasticityConfigError",
        until="0.19.7",
    ),
    Conflict(
        keys=("fp16.enabled", "bf16.enabled"),
        holds=lambda c: c.get("fp16.enabled") is True and c.get("bf16.enabled") is True,
        cause="fp16 and bf16 are both switched on",
        fix="keep one; bf16 where the GPU has it (Ampere and newer)",
        patch={"fp16": {"enabled": False}},
        message="bfloat16 and fp16 modes cannot be simultaneously enabled",
    ),
    Conflict(
        keys=(_COMM,),
        holds=_narrow_reduction,
        cause="gradients are reduced in fp16 although the run is not: values beyond 65504 become inf in the reduction",
        fix="leave communication_data_type out, or write fp32",
        patch={_COMM: "fp32"},
        severity="warning",
        caveat="A risk, not a failure: it shows only where gradients get that large.",
    ),
    Conflict(
        keys=("data_types.grad_accum_dtype",),
        holds=_accumulates_otherwise,
        cause="without ZeRO, gradients can only be accumulated in the precision of the weights",
        fix="leave grad_accum_dtype out, or use ZeRO stage 1 or higher",
        patch={"data_types": {"grad_accum_dtype": None}},
        message=r"unsupported mix of model",
    ),
    Conflict(
        keys=("data_types.param_dtype",),
        holds=_cast_otherwise,
        cause="param_dtype differs from the precision that fp16 or bf16 switches on",
        fix="leave param_dtype out",
        patch={"data_types": {"param_dtype": None}},
        message=r"data_types\.param_dtype=.* conflicts",
        since="0.19.2",
    ),
    Conflict(
        keys=("fp16.fp16_master_weights_and_grads", f"{_ZERO}.stage"),
        holds=_masters_beside_stage_2,
        cause="fp16 master weights need ZeRO stage 2",
        fix="drop fp16_master_weights_and_grads",
        patch={"fp16": {"fp16_master_weights_and_grads": None}},
        message="Fp16_master_weights_and_grads is only supported with ZeRO Stage 2 for now",
        until="0.18.2",
    ),
    Conflict(
        keys=("fp16.fp16_master_weights_and_grads",),
        holds=lambda c: c.stage == 0 and c.get("fp16.fp16_master_weights_and_grads") is True,
        cause="fp16 master weights need ZeRO stage 1, 2 or 3",
        fix="drop fp16_master_weights_and_grads",
        patch={"fp16": {"fp16_master_weights_and_grads": None}},
        message="Fp16_master_weights_and_grads is only supported with ZeRO Stage 1",
        since="0.18.3",
    ),
    Conflict(
        keys=("bf16.bf16_master_weights_and_grads",),
        holds=lambda c: c.stage == 0 and c.get("bf16.bf16_master_weights_and_grads") is True,
        cause="bf16 master weights need ZeRO stage 1, 2 or 3",
        fix="drop bf16_master_weights_and_grads",
        patch={"bf16": {"bf16_master_weights_and_grads": None, "bf16_optimizer_states": None}},
        message="Bf16_master_weights_and_grads is only supported",
        since="0.18.3",
    ),
    Conflict(
        keys=("bf16.bf16_optimizer_states", "bf16.bf16_master_weights_and_grads"),
        holds=lambda c: (
            c.get("bf16.bf16_optimizer_states") is True and c.get("bf16.bf16_master_weights_and_grads") is not True
        ),
        cause="bf16 optimizer states need bf16 master weights",
        fix="drop bf16_optimizer_states, or switch bf16_master_weights_and_grads on too (ZeRO stage 1 to 3)",
        patch={"bf16": {"bf16_optimizer_states": None}},
        message="bf16_optimizer_states requires bf16_master_weights_and_grad",
        since="0.18.3",
    ),
    Conflict(
        keys=("fp16.fp16_master_weights_and_grads", "bf16.bf16_master_weights_and_grads"),
        holds=_masters_without_cpu,
        cause="16-bit master weights need the optimizer on the CPU (DeepSpeedCPUAdam)",
        fix="offload the optimizer to the CPU, or drop the key",
        patch={_ZERO: {"offload_optimizer": {"device": "cpu"}}},
        message="Master weights feature requires",
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
        keys=(f"{_ZERO}.cpu_offload", f"{_ZERO}.offload_optimizer"),
        holds=_both_spellings,
        cause="an old key stands beside its successor; DeepSpeed refuses both together",
        fix="drop the old key",
        patch={_ZERO: dict.fromkeys(_OLD_KEYS)},
        message="Cannot provide deprecated parameter",
    ),
    Conflict(
        keys=(f"{_ZERO}.offload_optimizer.ratio", f"{_ZERO}.stage"),
        holds=_partial_offload,
        cause="a part of the optimizer can be offloaded at stage 3 only",
        fix="drop ratio, or use stage 3",
        patch={_ZERO: {"offload_optimizer": {"ratio": None}}},
        message="Partial offloading only supported for ZeRO Stage 3",
        since="0.15.4",
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
        keys=(f"{_ZERO}.compute_grad_norm", "gradient_clipping"),
        holds=_no_norm,
        cause="compute_grad_norm false needs stage 1 or 2, gradient_clipping 0 (the default is 1.0) and no offload",
        fix="drop compute_grad_norm",
        patch={_ZERO: {"compute_grad_norm": None}},
        message="compute_grad_norm=false",
        since="0.19.8",
    ),
    Conflict(
        keys=(f"{_ZERO}.legacy_stage1",),
        holds=lambda c: c.stage > 0 and c.get(f"{_ZERO}.legacy_stage1") is True,
        cause="the old ZeRO stage 1 is gone; DeepSpeed raises",
        fix="drop legacy_stage1",
        patch={_ZERO: {"legacy_stage1": None}},
        message="deprecated version of ZeRO Stage 1 is not supported",
    ),
    Conflict(
        keys=("optimizer.type", f"{_ZERO}.reduce_scatter"),
        holds=_muon_scatters,
        cause="Muon at stage 3 needs reduce_scatter off, which is on by default",
        fix="switch reduce_scatter off",
        patch={_ZERO: {"reduce_scatter": False}},
        message="Muon and reduce scatter cannot be used together",
        since="0.19.0",
    ),
    Conflict(
        keys=("optimizer.type", f"{_ZERO}.reduce_scatter", f"{_ZERO}.offload_optimizer"),
        holds=_muon_offloads,
        cause="Muon with an offloaded optimizer needs reduce_scatter off, which is on by default",
        fix="switch reduce_scatter off",
        patch={_ZERO: {"reduce_scatter": False}},
        message="Muon with reduce scatter does not support optimizer offload",
        since="0.19.3",
        until="0.19.6",
    ),
    Conflict(
        keys=(f"{_ZERO}.allgather_bucket_size",),
        holds=_odd_bucket,
        cause="allgather_bucket_size has to be even",
        fix="write an even number",
        message="allgather_bucket_size must be a multiple",
    ),
    Conflict(
        keys=("optimizer.type", "fp16.loss_scale"),
        holds=_lamb_static,
        cause="the Lamb optimizer needs fp16 with a dynamic loss scale",
        fix="use fp16 with loss_scale 0, or another optimizer",
        message="optimizer requires dynamic loss scaling",
    ),
    Conflict(
        keys=("fp16.loss_scale_window", "fp16.min_loss_scale"),
        holds=_no_window,
        cause="a dynamic loss scale needs loss_scale_window and min_loss_scale above 0",
        fix="drop both, for the defaults 1000 and 1",
        patch={"fp16": {"loss_scale_window": None, "min_loss_scale": None}},
        message=r"fp16\.(?:loss_scale_window|min_loss_scale) must be > 0",
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
        keys=("torch_autocast.enabled", f"{_ZERO}.zero_quantized_weights"),
        holds=lambda c: (
            c.get("torch_autocast.enabled") is True
            and c.get(f"{_ZERO}.zero_quantized_weights") is True
            and c.stage == 3
        ),
        cause="torch_autocast does not go with quantized weights",
        fix="switch one of them off",
        patch={_ZERO: {"zero_quantized_weights": None}},
        message="Cannot enable both torch autocast and zero quantized weights",
        since="0.17.5",
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
        keys=(f"{_ZERO}.elastic_checkpoint",),
        holds=lambda c: c.stage == 3 and c.get(f"{_ZERO}.elastic_checkpoint") is True,
        cause="elastic_checkpoint fails at stage 3 when a checkpoint is saved or loaded",
        fix="drop elastic_checkpoint and use universal checkpoints",
        patch={_ZERO: {"elastic_checkpoint": None}},
        severity="warning",
    ),
    Conflict(
        keys=("zero_force_ds_cpu_optimizer", f"{_ZERO}.offload_optimizer"),
        holds=_not_in_config,
        cause="the script passes its own optimizer, and the config offloads the optimizer to the CPU",
        fix="move the optimizer into the config, or pass DeepSpeedCPUAdam; or set zero_force_ds_cpu_optimizer to false",
        patch={"zero_force_ds_cpu_optimizer": False},
        message="You are using ZeRO-Offload with a client provided optimizer",
    ),
    Conflict(
        keys=(f"{_ZERO}.stage",),
        holds=lambda c: c.stage >= 2,
        calls=("PipelineModule",),
        cause="pipeline parallelism goes with ZeRO stage 0 and 1 only",
        fix="use stage 1",
        patch={_ZERO: {"stage": 1}},
        message="ZeRO-2 and ZeRO-3 are incompatible with pipeline parallelism",
    ),
    Conflict(
        keys=("optimizer", f"{_ZERO}.stage"),
        holds=_not_in_config,
        cause="ZeRO needs an optimizer, and neither the config nor the script gives one",
        fix="write an optimizer section, for instance AdamW, or pass an optimizer to deepspeed.initialize",
        message=r"zero stage \d requires an optimizer",
    ),
)
