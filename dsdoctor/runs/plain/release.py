"""Defaults that depend on the installed DeepSpeed release. Runs in rank processes only.

The constants are read out of DeepSpeed rather than kept in a table of ours, so an unseen release answers for itself.
"""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from typing import Any


def release() -> tuple[int, ...]:
    """The installed release as numbers, `(0, 19, 8)`."""
    version = str(import_module("deepspeed").__version__)
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def _constants() -> Any:
    return import_module("deepspeed.runtime.constants")


def default_clipping() -> float:
    """What `gradient_clipping` is when the config lacks it: 1.0 since 0.19.3, 0 (off) before."""
    return float(getattr(_constants(), "GRADIENT_CLIPPING_DEFAULT", 0.0))


def casts_buffers() -> bool:
    """Whether fp16/bf16 casts the buffers too. Releases that know `data_types.buffer_dtype` leave them alone."""
    return not hasattr(_constants(), "BUFFER_DTYPE")


def bare_scale_defaults() -> bool:
    """Whether a config without loss-scale keys starts at 2**32 with hysteresis 1 (up to 0.17.0)."""
    return release() < (0, 17, 1)


def begins_with_an_empty_step(precision: str, zero_stage: int) -> bool:
    """Whether a step with zero gradients makes the optimizer's state: without ZeRO fp16 and, since 0.17.6, bf16."""
    return zero_stage == 0 and (precision == "fp16" or (precision == "bf16" and release() >= (0, 17, 6)))


def growth_delay() -> int:
    """Clean steps beyond the window before the loss scale doubles: one since 0.17.1, none before."""
    return 0 if release() < (0, 17, 1) else 1


def warmup_max_lr() -> float | None:
    """Where WarmupLR ends by default: a fixed rate in older releases, None for the optimizer's own in newer ones."""
    schedule = import_module("deepspeed.runtime.lr_schedules").WarmupLR
    default = inspect.signature(schedule).parameters["warmup_max_lr"].default
    return None if default is None else float(default)
