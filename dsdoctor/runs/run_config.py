"""The copy of the ds_config that a run uses: what dsdoctor changes in it, each change for a stated reason.

Pure functions from dictionary to dictionary; no torch.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

_PRECISION_SECTIONS = ("fp16", "bf16", "bfloat16", "amp", "torch_autocast", "data_types")
_PRECISION_KEYS = ("communication_data_type", "seq_parallel_communication_data_type", "fp16_lamb")
_TALKATIVE = ("debug", "info")
_MONITORS = ("tensorboard", "csv_monitor")


def in_fp32(config: Mapping[str, Any]) -> dict[str, Any]:
    """A copy that trains in fp32 and communicates in fp32: everything that asks for less is gone."""
    left_out = (*_PRECISION_SECTIONS, *_PRECISION_KEYS)
    return {key: copy.deepcopy(value) for key, value in config.items() if key not in left_out}


def without_zero(config: Mapping[str, Any]) -> dict[str, Any]:
    """A copy for runs without DeepSpeed: no ZeRO, hence no partitioning and no offload."""
    return {key: copy.deepcopy(value) for key, value in config.items() if key != "zero_optimization"}


def with_visible_overflows(config: Mapping[str, Any]) -> dict[str, Any]:
    """A copy in which DeepSpeed prints its lines about skipped steps (they are at level INFO, hidden by default)."""
    level = config.get("log_level")
    return {**copy.deepcopy(dict(config)), "log_level": level if level in _TALKATIVE else "info"}


def written_paths(config: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """(section, key, path) of what DeepSpeed's own monitors and profiler write; without a path they use the home."""
    for section in _MONITORS:
        if _enabled(config, section):
            yield section, "output_path", str(config[section].get("output_path") or f"~/{section}")
    if _enabled(config, "flops_profiler") and config["flops_profiler"].get("output_file"):
        yield "flops_profiler", "output_file", str(config["flops_profiler"]["output_file"])


def asks_fp16(config: Mapping[str, Any]) -> bool:
    return _enabled(config, "fp16") or _autocast_dtype(config) == "fp16"


def precision(config: Mapping[str, Any]) -> str:
    """fp32, fp16 or bf16, as DeepSpeed will understand the config ("auto" that nobody resolved means off)."""
    if asks_fp16(config):
        return "fp16"
    if _enabled(config, "bf16") or _enabled(config, "bfloat16") or _autocast_dtype(config) == "bf16":
        return "bf16"
    return "fp32"


def zero_stage(config: Mapping[str, Any]) -> int:
    """The ZeRO stage in force; the old form `"zero_optimization": true` means 1."""
    zero = config.get("zero_optimization")
    if isinstance(zero, dict):
        stage = zero.get("stage", 0)
        return int(stage) if str(stage).isdigit() else 0
    return 1 if zero is True else 0


def accumulation_steps(config: Mapping[str, Any], world_size: int) -> int:
    """Micro-steps in an optimizer step, from the batch sizes where the key itself is absent; 1 where unknown."""
    steps = config.get("gradient_accumulation_steps")
    if isinstance(steps, int):
        return steps
    batch, micro = config.get("train_batch_size"), config.get("train_micro_batch_size_per_gpu")
    if isinstance(batch, int) and isinstance(micro, int) and micro > 0:
        return max(1, batch // micro // max(1, world_size))
    return 1


def dynamic_loss_scale(config: Mapping[str, Any]) -> bool:
    if _enabled(config, "fp16"):
        return not config["fp16"].get("loss_scale", 0)
    return _autocast_dtype(config) == "fp16"


def min_loss_scale(config: Mapping[str, Any]) -> float | None:
    """The floor of a dynamic loss scale; None where there is no such scale, or none that stops."""
    if not _enabled(config, "fp16") or not dynamic_loss_scale(config):
        return None
    floor = config["fp16"].get("min_loss_scale", 1)
    return float(floor) if isinstance(floor, (int, float)) else 1.0


def differences(given: Mapping[str, Any], passed: Mapping[str, Any]) -> tuple[str, ...]:
    """Dotted keys whose values differ between two configs, sorted."""
    left, right = dict(_flat(given)), dict(_flat(passed))
    return tuple(sorted(key for key in left.keys() | right.keys() if left.get(key) != right.get(key)))


def _enabled(config: Mapping[str, Any], section: str) -> bool:
    values = config.get(section)
    return isinstance(values, dict) and str(values.get("enabled", False)).lower() in ("true", "1")


def _autocast_dtype(config: Mapping[str, Any]) -> str | None:
    if not _enabled(config, "torch_autocast"):
        return None
    name = str(config["torch_autocast"].get("dtype", "bfloat16")).removeprefix("torch.")
    return "fp16" if name in ("fp16", "float16", "half") else "bf16"


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
