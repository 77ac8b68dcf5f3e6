"""The faults that are planted, each with what dsdoctor has to say of it.

A fault changes the source (text put in place of a `# PLANT` mark), the ds_config (a merge patch), the arguments or the
environment. What is expected follows from the contract's rows of blame, not from what dsdoctor once answered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

STYLES = ("loop", "trainer", "accelerated")
BF16 = {"bf16": {"enabled": True}}
FP16 = {"bf16": None, "fp16": {"enabled": True, "initial_scale_power": 12}}
KEY_ERROR = {"batch": "if step == 3 and rank == 1: {}['unknown']"}
LOG_OF_ZERO = {"loss": "loss = loss + (0 * torch.log(loss * 0) if step == 4 else 0)"}
_EVERY = ("loop", "trainer", "accelerated")
_OWN_LOOP = ("loop", "accelerated")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault. `culprit` are keys of which one must be named, `ids` diagnoses of which one must be found.

    `stages` are the ZeRO stages at which it can be planted; `options` are further options of dsdoctor.
    """

    name: str
    blame: tuple[str, ...]
    plant: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    ids: tuple[str, ...] = ()
    culprit: tuple[str, ...] = ()
    bad: Mapping[str, Any] = field(default_factory=dict)
    styles: tuple[str, ...] = _EVERY
    stages: tuple[int, ...] = (0, 1, 2, 3)
    options: tuple[str, ...] = ()
    busy_port: bool = False


NAN = ("numerics/nan-loss", "numerics/bad-input", "numerics/loss-zero-is-nan", "numerics/silent-skip")
FAULTS = (
    Fault(name="healthy", blame=("healthy",)),
    Fault(name="healthy-fp16", blame=("healthy",), config=FP16, stages=(1, 2, 3)),
    Fault(name="healthy-accumulated", blame=("healthy",), config={"gradient_accumulation_steps": 2}),
    Fault(
        name="healthy-offload",
        blame=("healthy",),
        config={"zero_optimization": {"offload_optimizer": {"device": "cpu"}}, "zero_force_ds_cpu_optimizer": False},
        stages=(1, 2, 3),
    ),
    Fault(
        name="nan-input",
        blame=("script",),
        plant={"batch": "if step == 3 and rank == 1: x[0] = float('nan')"},
        ids=NAN,
        bad={"rank": 1, "step": 3, "phase": "input"},
        styles=_OWN_LOOP,
    ),
    Fault(
        name="nan-input-accumulated",
        blame=("script",),
        plant={"batch": "if step == 5 and rank == 1: x[0] = float('nan')"},
        config={"gradient_accumulation_steps": 2},
        ids=NAN,
        bad={"rank": 1, "step": 2, "micro_step": 1, "phase": "input"},
        styles=_OWN_LOOP,
    ),
    Fault(
        name="log-of-zero",
        blame=("script",),
        plant=LOG_OF_ZERO,
        ids=NAN,
        bad={"step": 4},
    ),
    Fault(
        name="key-error",
        blame=("script",),
        plant=KEY_ERROR,
        ids=("launch/user-exception",),
    ),
    Fault(
        name="stalled-rank",
        blame=("script",),
        plant={"batch": "if step == 3 and rank == 1: __import__('time').sleep(3600)"},
        ids=("hang/stalled-rank", "hang/uneven-batches", "comm/stalled-rank"),
        options=("--stall", "10"),
    ),
    Fault(
        name="uneven-batches",
        blame=("script",),
        plant={"batch": "if step == 3 and rank == 1: break"},
        ids=("hang/uneven-batches", "comm/missing-rank", "launch/peer-failure"),
        styles=_OWN_LOOP,
        options=("--stall", "10"),
    ),
    Fault(
        name="killed-rank",
        blame=("script", "environment"),
        plant={"batch": "if step == 3 and rank == 1: __import__('os').kill(__import__('os').getpid(), 9)"},
        ids=("launch/killed", "memory/host-oom-kill"),
    ),
    Fault(
        name="exit-status",
        blame=("script",),
        plant={"batch": "if step == 3 and rank == 1: __import__('sys').exit('no more data')"},
    ),
    Fault(
        name="overflow",
        blame=("precision",),
        plant={"forward": "hidden = hidden * 300 * 300 / (300 * 300)"},
        config=FP16,
        stages=(1, 2, 3),
        styles=_OWN_LOOP,
        ids=("loss-scale/collapse", "numerics/nan-loss"),
        bad={"step": 0, "phase": "forward"},
    ),
    Fault(
        name="huge-rate",
        blame=("config",),
        config={"optimizer": {"params": {"lr": 3e4}}},
        culprit=("optimizer.params.lr",),
        ids=("config/suspicious-value", "config/guilty-key", *NAN),
        styles=("loop",),
    ),
    Fault(
        name="high-rate",
        blame=("config",),
        plant={"loss": "loss = loss / (loss < 50)"},
        config={"optimizer": {"params": {"lr": 0.9}}},
        culprit=("optimizer.params.lr",),
        ids=("config/guilty-key",),
        styles=("loop",),
    ),
    Fault(
        name="batch-sizes",
        blame=("config",),
        config={"train_batch_size": 64, "gradient_accumulation_steps": 2, "train_micro_batch_size_per_gpu": 4},
        culprit=("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
        ids=("config/batch-size", "config/hf-mismatch"),
    ),
    Fault(
        name="auto",
        blame=("config",),
        config={"gradient_clipping": "auto"},
        culprit=("gradient_clipping",),
        ids=("config/auto-unresolved",),
        styles=("loop",),
    ),
    Fault(
        name="hf-mismatch",
        blame=("config",),
        config={"train_micro_batch_size_per_gpu": 2},
        culprit=("train_micro_batch_size_per_gpu",),
        ids=("config/hf-mismatch",),
        styles=("trainer",),
    ),
    Fault(
        name="unknown-key",
        blame=("config",),
        config={"zero_optimization": {"overlap_com": True}},
        culprit=("zero_optimization.overlap_com",),
        ids=("config/unknown-key",),
    ),
    Fault(
        name="two-precisions",
        blame=("config",),
        config={"fp16": {"enabled": True}, "bf16": {"enabled": True}},
        culprit=("fp16.enabled", "bf16.enabled", "fp16", "bf16"),
        ids=("config/conflict", "config/hf-mismatch"),
    ),
    Fault(
        name="static-scale",
        blame=("config",),
        config={"bf16": None, "fp16": {"enabled": True, "loss_scale": 2.0**30, "initial_scale_power": None}},
        culprit=("fp16.loss_scale",),
        ids=("loss-scale/static", "config/guilty-key"),
        stages=(1, 2, 3),
    ),
    Fault(
        name="narrow-communication",
        blame=("config",),
        plant={"loss": "loss = loss * 1e7"},
        config={"communication_data_type": "fp16", "gradient_clipping": 1.0},
        culprit=("communication_data_type",),
        ids=("numerics/reduction-overflow", "config/conflict", "config/guilty-key", *NAN),
        styles=_OWN_LOOP,
        stages=(1, 2),
    ),
    Fault(
        name="weight-outside",
        blame=("config",),
        plant={"loss": "loss = loss + 0 * (getattr(WEIGHTS, 'weight').float() @ torch.ones(WIDTH, 1)).sum()"},
        config={"zero_optimization": {"stage3_param_persistence_threshold": 0}},
        culprit=("zero_optimization.stage",),
        ids=("zero3/empty-weights-in-model", "config/guilty-key"),
        stages=(3,),
    ),
    Fault(
        # DeepSpeed hands its ZeRO optimizer to torch's schedules, which refuse it; another schedule avoids that.
        name="schedule-of-torch",
        blame=("deepspeed", "config"),
        config={"scheduler": {"type": "StepLR", "params": {"step_size": 3}}},
        culprit=("scheduler.type",),
        stages=(1, 2, 3),
        styles=("loop",),
    ),
    Fault(
        name="schedule",
        blame=("config",),
        plant={"loss": "loss = loss / (loss < 1e6)"},
        config={"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 4e4, "warmup_num_steps": 2}}},
        culprit=("scheduler.params.warmup_max_lr", "scheduler.type"),
        ids=("config/suspicious-value", "config/guilty-key", *NAN),
        styles=("loop",),
    ),
    Fault(
        name="unscaled-fp16",
        blame=("deepspeed",),
        config=FP16,
        ids=("version/known-defect",),
        stages=(0,),
        styles=_OWN_LOOP,
    ),
    Fault(
        name="key-error-unscaled-fp16",
        blame=("script",),
        plant=KEY_ERROR,
        config=FP16,
        ids=("launch/user-exception",),
        stages=(0,),
        styles=_OWN_LOOP,
    ),
    Fault(
        name="log-of-zero-unscaled-fp16",
        blame=("script",),
        plant=LOG_OF_ZERO,
        config=FP16,
        ids=NAN,
        bad={"step": 4},
        stages=(0,),
        styles=_OWN_LOOP,
    ),
    Fault(
        name="complex-parameter",
        blame=("deepspeed",),
        plant={
            "model": "model.head.spectrum = torch.nn.Parameter(torch.ones(3, dtype=torch.cfloat))",
            "loss": "loss = loss + 0 * SPECTRUM",
        },
        ids=("deepspeed/internal-error", "version/known-defect"),
        styles=("loop",),
        stages=(1, 2, 3),
    ),
    Fault(
        name="busy-port",
        blame=("environment",),
        ids=("launch/port-in-use",),
        busy_port=True,
    ),
    Fault(
        name="no-device",
        blame=("environment",),
        ids=("environment/no-device",),
        options=("--device", "cuda"),
    ),
)
PLACES = {
    # What the text of a fault calls the first weight and its width, in each style.
    "loop": {"WEIGHTS": "engine.module.embed", "WIDTH": "16", "SPECTRUM": "engine.module.head.spectrum.abs().sum()"},
    "trainer": {"WEIGHTS": "self.model.transformer.wte", "WIDTH": "32"},
    "accelerated": {"WEIGHTS": "model.module.embed", "WIDTH": "16"},
}


def config_of(style: str, stage: int) -> dict[str, Any]:
    """The healthy ds_config of a style."""
    zero: dict[str, Any] = {"stage": stage, "reduce_bucket_size": 100_000, "allgather_bucket_size": 100_000}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "bf16": {"enabled": True},
        "zero_optimization": zero,
    }
    if style == "trainer":
        config |= {"gradient_accumulation_steps": "auto", "gradient_clipping": "auto"}
        config["optimizer"]["params"] = {"lr": "auto", "betas": "auto", "eps": "auto", "torch_adam": True}
    return config


def arguments_of(style: str, config: Mapping[str, Any]) -> list[str]:
    """The script's own arguments."""
    if style == "loop":
        return ["--deepspeed", "--deepspeed_config", "ds_config.json"]
    if style == "accelerated":
        return ["--config", "ds_config.json"]
    fp16 = bool((config.get("fp16") or {}).get("enabled"))
    return [
        *("--output_dir", "out", "--use_cpu", "--fp16" if fp16 else "--bf16", "--report_to", "none"),
        *("--per_device_train_batch_size", "4", "--max_steps", "40", "--save_strategy", "no"),
        *("--deepspeed", "ds_config.json", "--logging_steps", "1"),
        *("--gradient_accumulation_steps", str(_whole(config.get("gradient_accumulation_steps")))),
    ]


def _whole(value: Any) -> int:
    return value if isinstance(value, int) else 1
