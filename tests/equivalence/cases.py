"""The matrix in which the plain engine has to train as DeepSpeed does: stage x precision x optimizer, and schedules."""

from __future__ import annotations

import json
from typing import Any

STAGES = (0, 1, 2, 3)
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 12, "loss_scale_window": 4}},
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "Adam (torch_adam)": {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True, "weight_decay": 0.1}},
    "AdamW (torch_adam)": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True, "betas": [0.8, 0.95]}},
    "Adam (L2)": {
        "type": "Adam",
        "params": {"lr": 1e-2, "torch_adam": True, "adam_w_mode": False, "weight_decay": 0.1},
    },
    "AdamW (fused)": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
    "AdamW (offloaded)": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
    "Adagrad": {"type": "Adagrad", "params": {"lr": 1e-2}},
    "Adagrad (offloaded)": {"type": "Adagrad", "params": {"lr": 1e-2}},
    "Lamb": {"type": "Lamb", "params": {"lr": 1e-2}},
    "Lion": {"type": "Lion", "params": {"lr": 1e-3}},
    "Lion (offloaded)": {"type": "Lion", "params": {"lr": 1e-3}},
    "Muon": {"type": "Muon", "params": {"lr": 1e-2, "torch_adam": True}},
    "OneBitAdam": {"type": "OneBitAdam", "params": {"lr": 1e-2}},
    "MuAdam": {"type": "MuAdam", "params": {"lr": 1e-2}},
    "SGD": {"type": "SGD", "params": {"lr": 1e-2, "momentum": 0.9, "nesterov": True}},
    "RMSprop": {"type": "RMSprop", "params": {"lr": 1e-3}},
    "NAdam": {"type": "NAdam", "params": {"lr": 1e-3}},
    "RAdam": {"type": "RAdam", "params": {"lr": 1e-2}},
    "Adamax": {"type": "Adamax", "params": {"lr": 1e-2}},
    "Adadelta": {"type": "Adadelta", "params": {"lr": 1.0}},
    "ASGD": {"type": "ASGD", "params": {"lr": 1e-2}},
    "Rprop": {"type": "Rprop", "params": {"lr": 1e-3}},
    "Adafactor": {"type": "Adafactor", "params": {"lr": 1e-2}},
    "LBFGS": {"type": "LBFGS", "params": {"lr": 1e-1}},
    "SparseAdam": {"type": "SparseAdam", "params": {"lr": 1e-2}},
}
SCHEDULES: dict[str, dict[str, Any]] = {
    "WarmupLR": {"warmup_max_lr": 1e-2, "warmup_num_steps": 4},
    "WarmupLR (linear)": {"warmup_max_lr": 1e-2, "warmup_num_steps": 4, "warmup_type": "linear"},
    "WarmupDecayLR": {"total_num_steps": 10, "warmup_max_lr": 1e-2, "warmup_num_steps": 3},
    "WarmupCosineLR": {"total_num_steps": 10, "warmup_num_steps": 3},
    "OneCycle": {"cycle_min_lr": 1e-3, "cycle_max_lr": 1e-2, "cycle_first_step_size": 4, "decay_step_size": 2},
    "LRRangeTest": {"lr_range_test_min_lr": 1e-3, "lr_range_test_step_size": 3},
    "StepLR": {"step_size": 3, "gamma": 0.5},
    "ExponentialLR": {"gamma": 0.8},
    "CosineAnnealingLR": {"T_max": 8},
    "LinearLR": {"total_iters": 5},
    "OneCycleLR": {"max_lr": 1e-2, "total_steps": 20},
}
ACCUMULATED = 2
MICRO_STEPS = 12
ADAM = "AdamW (torch_adam)"


def configs() -> dict[str, dict[str, Any]]:
    """Every case by its name, `zeroSTAGE/PRECISION/OPTIMIZER` or `zeroSTAGE/PRECISION/ADAM + SCHEDULE`."""
    found: dict[str, dict[str, Any]] = {}
    for stage in STAGES:
        for precision in PRECISIONS:
            where = f"zero{stage}/{precision}"
            for name in OPTIMIZERS:
                if stage > 0 or "offloaded" not in name:
                    found[f"{where}/{name}"] = config(stage, precision, name)
            for name in SCHEDULES:
                found[f"{where}/{ADAM} + {name}"] = config(stage, precision, ADAM, schedule=name)
            accumulated = {"gradient_accumulation_steps": ACCUMULATED, "gradient_clipping": 0.1}
            found[f"{where}/{ADAM} + accumulation"] = config(stage, precision, ADAM) | accumulated
    return found


def config(stage: int, precision: str, optimizer: str, schedule: str | None = None) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage, "reduce_bucket_size": 4096, "allgather_bucket_size": 4096}
    if stage == 3:
        zero["stage3_param_persistence_threshold"] = 0  # else a small model is not partitioned at all
    if "offloaded" in optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
    if optimizer == "Muon":
        zero["reduce_scatter"] = False  # which Muon asks for
    built = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "optimizer": OPTIMIZERS[optimizer],
        **PRECISIONS[precision],
    }
    if schedule is not None:
        built["scheduler"] = {"type": schedule.partition(" ")[0], "params": SCHEDULES[schedule]}
    copied: dict[str, Any] = json.loads(json.dumps(built))
    return copied


def parts(name: str) -> tuple[int, str, str]:
    """Stage, precision and what is trained with, of a case's name."""
    stage, precision, rest = name.split("/", 2)
    return int(stage.removeprefix("zero")), precision, rest
