"""Whether the sizes in a config divide by the number of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class DoesNotDivide(Exception):
    """No job of that many ranks can have this config; `str()` is one line for the user."""


def check(config: Mapping[str, Any], ranks: int) -> None:
    """Raises DoesNotDivide for batch sizes, hpZ partitions or expert parallelism that do not go into the ranks."""
    total = _whole(config.get("train_batch_size"))
    micro = _whole(config.get("train_micro_batch_size_per_gpu")) or 1
    steps = _whole(config.get("gradient_accumulation_steps")) or 1
    parts = sequence_parallel(config)
    if ranks % parts:
        raise DoesNotDivide(f"{ranks} ranks do not divide by sequence_parallel_size {parts}")
    if total and total % (micro * steps * (ranks // parts)):
        each = f"{ranks // parts} ranks x micro-batch {micro} x {steps} micro-step(s)"
        raise DoesNotDivide(f"train_batch_size {total} does not divide by {each}")
    for key, size in (
        ("zero_optimization.zero_hpz_partition_size", _at(config, "zero_optimization", "zero_hpz_partition_size")),
        ("expert_parallel.autoep_size", _at(config, "expert_parallel", "autoep_size")),
    ):
        if size and ranks % size:
            raise DoesNotDivide(f"{ranks} ranks do not divide by {key} {size}")


def expert_parallel(config: Mapping[str, Any]) -> int:
    """Ranks over which the experts are spread; 1 without AutoEP."""
    section = config.get("expert_parallel")
    on = isinstance(section, Mapping) and section.get("enabled") is True
    return (_at(config, "expert_parallel", "autoep_size") or 1) if on else 1


def sequence_parallel(config: Mapping[str, Any]) -> int:
    """Ranks that share a sequence; 1 without sequence parallelism."""
    return _whole(config.get("sequence_parallel_size")) or 1


def _at(config: Mapping[str, Any], section: str, key: str) -> int | None:
    part = config.get(section)
    return _whole(part.get(key)) if isinstance(part, Mapping) else None


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
