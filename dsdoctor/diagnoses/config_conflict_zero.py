"""Options of the ds_config that exclude each other: ZeRO's stages, offload, checkpoints and optimizers."""

from __future__ import annotations

from dsdoctor.diagnoses.config_conflict_entry import Conflict
from dsdoctor.dsconfig.effective import Effective
from dsdoctor.scripts.facts import Call, ScriptFacts

_ZERO = "zero_optimization"
_OLD_KEYS = ("cpu_offload", "cpu_offload_param", "stage3_gather_fp16_weights_on_model_save")
ONE_BIT = ("onebitadam", "zerooneadam", "onebitlamb")
"""Optimizers of releases before 0.19.7 that compress their own communication."""


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


def _one_bit(config: Effective) -> bool:
    return config.stage > 0 and config.optimizer in ONE_BIT and config.optimizer in config.schema.optimizer_names


def _holds_reduction_back(script: ScriptFacts) -> bool:
    engines = {call.targets[0] for call in script.named("initialize") if call.targets}
    return any(call.owner in engines for call in script.named("no_sync"))


def _odd_bucket(config: Effective) -> bool:
    size = config.get(f"{_ZERO}.allgather_bucket_size")
    return config.stage in (1, 2) and isinstance(size, int) and size % 2 == 1


def _quantized_gradients(config: Effective) -> bool:
    quantized = config.get(f"{_ZERO}.zero_quantized_gradients") is True
    return config.stage == 3 and quantized and config.get(f"{_ZERO}.reduce_scatter") is False


def _zenflow(config: Effective) -> bool:
    return isinstance(config.get(f"{_ZERO}.zenflow"), dict) and config.stage > 0


def _zenflow_without_offload(config: Effective) -> bool:
    return _zenflow(config) and config.stage < 3 and config.offload("optimizer") == "none"


def _zenflow_intervals(config: Effective) -> bool:
    select, update = (config.get(f"{_ZERO}.zenflow.{name}_interval") for name in ("select", "update"))
    return _zenflow(config) and isinstance(select, int) and isinstance(update, int) and select < update


def _zenflow_overlap(config: Effective) -> bool:
    offloads = config.get(f"{_ZERO}.zenflow.offload") is True
    return _zenflow(config) and offloads and config.get(f"{_ZERO}.overlap_comm") is not True


def _offloads_foreign_optimizer(config: Effective) -> bool:
    forced = config.get("zero_force_ds_cpu_optimizer") is True
    return config.stage > 0 and config.offload("optimizer") != "none" and forced


def _passes_optimizer(script: ScriptFacts) -> bool:
    """The script hands `deepspeed.initialize` an optimizer that is not DeepSpeed's own for the CPU."""
    own = script.calls_any("DeepSpeedCPUAdam", "DeepSpeedCPULion")
    return not own and any(_optimizer_of(call) not in (None, "", "None") for call in _starts(script))


def _passes_none(script: ScriptFacts) -> bool:
    starts = _starts(script)
    return len(starts) == 1 and not starts[0].open and _optimizer_of(starts[0]) is None


def _starts(script: ScriptFacts) -> list[Call]:
    return [call for call in script.named("initialize") if call.owner in ("deepspeed", "ds")]


def _optimizer_of(call: Call) -> str | None:
    """The third argument of `deepspeed.initialize`, as written; None where it is not given."""
    return call.given.get("optimizer", call.arguments[2] if len(call.arguments) > 2 else None)


CONFLICTS: tuple[Conflict, ...] = (
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
        keys=("optimizer.type", f"{_ZERO}.stage"),
        holds=_one_bit,
        cause="the 1-bit optimizers reduce the gradients themselves, compressed, and do not work with ZeRO",
        fix="use stage 0 with them, or AdamW with ZeRO",
        patch={_ZERO: {"stage": 0}},
        message=r"(?:1bit-Adam|0/1 Adam|1bit-Lamb) is not compatible with ZeRO",
    ),
    Conflict(
        keys=(f"{_ZERO}.stage",),
        holds=lambda c: c.stage >= 2,
        script=_holds_reduction_back,
        cause="the script accumulates gradients under no_sync, and from stage 2 on each backward pass partitions them",
        fix="use stage 1, or leave no_sync out and let DeepSpeed count gradient_accumulation_steps; under the Trainer "
        "or Accelerate a newer release of it leaves no_sync out",
        patch={_ZERO: {"stage": 1}},
        message="no_sync context manager is incompatible with gradient partitioning",
        since="0.16.0",
    ),
    Conflict(
        keys=(f"{_ZERO}.allgather_bucket_size",),
        holds=_odd_bucket,
        cause="allgather_bucket_size has to be even",
        fix="write an even number",
        message="allgather_bucket_size must be a multiple",
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
        holds=_offloads_foreign_optimizer,
        script=_passes_optimizer,
        cause="the script passes its own optimizer, and the config offloads the optimizer to the CPU",
        fix="move the optimizer into the config, or pass DeepSpeedCPUAdam; or set zero_force_ds_cpu_optimizer to false",
        patch={"zero_force_ds_cpu_optimizer": False},
        message="You are using ZeRO-Offload with a client provided optimizer",
    ),
    Conflict(
        keys=("optimizer", f"{_ZERO}.stage"),
        holds=lambda c: c.stage in (1, 2) and not c.given("optimizer"),
        script=_passes_none,
        cause="ZeRO needs an optimizer, and neither the config nor the script gives one",
        fix="write an optimizer section, for instance AdamW, or pass an optimizer to deepspeed.initialize",
        message=r"zero stage \d requires an optimizer",
    ),
    Conflict(
        keys=(f"{_ZERO}.zero_quantized_gradients", f"{_ZERO}.reduce_scatter"),
        holds=_quantized_gradients,
        cause="quantized gradients need reduce_scatter",
        fix="switch reduce_scatter on",
        patch={_ZERO: {"reduce_scatter": None}},
        message="when enable all_to_all_reduce, reduce_scatter should also be enabled",
    ),
    Conflict(
        keys=(f"{_ZERO}.zenflow", f"{_ZERO}.offload_optimizer"),
        holds=_zenflow_without_offload,
        cause="ZenFlow needs the optimizer on the CPU",
        fix="offload the optimizer to the CPU",
        patch={_ZERO: {"offload_optimizer": {"device": "cpu"}}},
        message="Zenflow must be used with cpu offload",
    ),
    Conflict(
        keys=(f"{_ZERO}.zenflow.select_interval", f"{_ZERO}.zenflow.update_interval"),
        holds=_zenflow_intervals,
        cause="ZenFlow's select_interval is smaller than its update_interval",
        fix="write a select_interval of at least update_interval",
        message="Select interval must be greater or equal to update interval",
    ),
    Conflict(
        keys=(f"{_ZERO}.zenflow.offload", f"{_ZERO}.overlap_comm"),
        holds=_zenflow_overlap,
        cause="ZenFlow offloads its selective optimizer only with overlap_comm",
        fix="switch overlap_comm on",
        patch={_ZERO: {"overlap_comm": True}},
        message="offload selective optimizer should be used with overlap_comm",
    ),
)
