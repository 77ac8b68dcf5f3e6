"""Options of the ds_config that exclude each other: fp16, bf16, autocast, types of gradients and of messages."""

from __future__ import annotations

from dsdoctor.diagnoses.config_conflict_entry import Conflict
from dsdoctor.dsconfig.effective import Effective
from dsdoctor.dsconfig.release import at_least

_ZERO = "zero_optimization"
_COMM = "communication_data_type"
_SPELLED = {
    "fp16": ("fp16", "float16", "half", "torch.float16"),
    "bf16": ("bf16", "bfloat16", "torch.bfloat16"),
    "fp32": ("fp32", "float32", "float", "torch.float32"),
}


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


def _lamb_static(config: Effective) -> bool:
    static = config.precision != "fp16" or config.get("fp16.loss_scale") != 0
    return config.optimizer == "lamb" and static


def _no_window(config: Effective) -> bool:
    values = [config.get("fp16.loss_scale_window")]
    if at_least(config.schema.release, "0.19.3"):  # older ones let the scale fall below any floor
        values.append(config.get("fp16.min_loss_scale"))
    dynamic = config.precision == "fp16" and config.get("fp16.loss_scale") == 0
    return dynamic and any(isinstance(value, (int, float)) and value <= 0 for value in values)


CONFLICTS: tuple[Conflict, ...] = (
    Conflict(
        keys=("fp16.enabled", "bf16.enabled"),
        holds=lambda c: c.get("fp16.enabled") is True and c.get("bf16.enabled") is True,
        cause="fp16 and bf16 are both switched on",
        fix="keep one; bf16 where the GPU has it (Ampere and newer)",
        patch={"fp16": {"enabled": False}},
        message="bfloat16 and fp16 modes cannot be simultaneously enabled|At most one of fp16 and bf16 can be True",
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
        keys=("amp.enabled", f"{_ZERO}.stage"),
        holds=lambda c: c.stage > 0 and c.get("amp.enabled") is True,
        cause="Apex amp and ZeRO exclude each other",
        fix="drop amp and use bf16 or fp16",
        patch={"amp": None, "bf16": {"enabled": True}},
        message="Amp and ZeRO are not currently compatible",
        until="0.19.7",
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
)
