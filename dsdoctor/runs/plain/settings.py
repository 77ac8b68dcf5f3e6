"""Reads the part of a ds_config that concerns training itself: batch sizes, precision, clipping, optimizer, schedule.

What concerns only DeepSpeed (ZeRO, offload, communication, logging) is left out on purpose: that is what the run
without DeepSpeed does without. A value that DeepSpeed would reject is replaced by a sensible one and noted, because
the run must show whether the script works, not whether the config does. Runs in rank processes only (imports torch).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from dsdoctor.runs.plain import release
from dsdoctor.runs.plain.errors import NotPlayed

Precision = Literal["fp32", "fp16", "bf16"]

_DTYPES = {
    "fp32": torch.float32, "float32": torch.float32, "float": torch.float32,
    "fp16": torch.float16, "float16": torch.float16, "half": torch.float16,
    "bf16": torch.bfloat16, "bfloat16": torch.bfloat16,
}  # fmt: skip

_SCALE_KEYS = ("initial_scale_power", "loss_scale_window", "hysteresis", "consecutive_hysteresis", "min_loss_scale")


@dataclass(frozen=True, kw_only=True)
class LossScaleSettings:
    """The fp16 section's loss scale. `static` is None where the scale is dynamic; `window` counts optimizer steps."""

    static: float | None = None
    initial: float = 2.0**16
    window: int = 1000
    hysteresis: int = 2
    consecutive_hysteresis: bool = False
    minimum: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How to train. Batch sizes are samples, `micro_batch` per rank; `clipping` 0 means none; dtypes None: left alone.

    `notes` lists what was changed or left out in reading the config.
    """

    micro_batch: int
    accumulation: int
    train_batch: int
    managed_accumulation: bool = True
    precision: Precision = "fp32"
    loss_scale: LossScaleSettings = LossScaleSettings()
    cast_inputs: bool = False
    autocast: torch.dtype | None = None
    accumulate_in: torch.dtype | None = None
    buffers_in: torch.dtype | None = None
    clipping: float = 0.0
    average: bool = True
    optimizer: str | None = None
    optimizer_params: Mapping[str, Any] = field(default_factory=dict)
    scheduler: str | None = None
    scheduler_params: Mapping[str, Any] = field(default_factory=dict)
    drop_last: bool = False
    notes: tuple[str, ...] = ()

    @property
    def model_dtype(self) -> torch.dtype | None:
        """What the model's parameters are cast to, None for fp32 (they stay as they are)."""
        return {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": None}[self.precision]


class _Reader:
    """Reads values, treating an unresolved "auto" as absent, and collects the notes."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.notes: list[str] = []

    def section(self, name: str) -> Mapping[str, Any]:
        found = self.config.get(name)
        return found if isinstance(found, Mapping) else {}

    def get(self, section: str, key: str, default: Any = None) -> Any:
        where = self.section(section) if section else self.config
        value = where.get(key)
        if value == "auto":
            self.notes.append(f'{section + "." if section else ""}{key} is "auto" and nothing filled it in: ignored')
            return default
        return default if value is None else value

    def params(self, section: str) -> dict[str, Any]:
        found = self.section(section).get("params") or {}
        for key in [k for k, v in found.items() if v == "auto"]:
            self.notes.append(f'{section}.params.{key} is "auto" and nothing filled it in: left out')
        return {k: v for k, v in found.items() if v != "auto"}


def read(config: Mapping[str, Any], world_size: int) -> Settings:
    """Read a ds_config for `world_size` data-parallel ranks.

    Raises:
        NotPlayed: the config asks for a kind of parallelism or data pipeline that needs DeepSpeed.
    """
    _refuse_what_needs_deepspeed(config)
    reader = _Reader(config)
    micro, accumulation, train = _batch_sizes(reader, world_size)
    precision = _precision(reader)
    autocast = _DTYPES.get(str(reader.get("torch_autocast", "dtype", "bf16")).removeprefix("torch."))
    return Settings(
        micro_batch=micro,
        accumulation=accumulation,
        train_batch=train,
        managed_accumulation=bool(reader.get("", "managed_gradient_accumulation", True)),
        precision=precision,
        loss_scale=_loss_scale(reader),
        cast_inputs=precision == "fp16" and bool(reader.get("fp16", "auto_cast", False)),
        autocast=autocast if reader.get("torch_autocast", "enabled", False) else None,
        accumulate_in=_dtype(reader, "grad_accum_dtype"),
        buffers_in=_dtype(reader, "buffer_dtype"),
        clipping=float(reader.get("", "gradient_clipping", release.default_clipping())),
        average=str(reader.get("", "gradient_allreduce_op", "mean")).lower() != "sum",
        optimizer=reader.get("optimizer", "type"),
        optimizer_params=reader.params("optimizer"),
        scheduler=reader.get("scheduler", "type"),
        scheduler_params=reader.params("scheduler"),
        drop_last=bool(reader.get("", "dataloader_drop_last", False)),
        notes=tuple(reader.notes),
    )


def _refuse_what_needs_deepspeed(config: Mapping[str, Any]) -> None:
    def enabled(*path: str) -> bool:
        value: Any = config
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else None
        return bool(value)

    tensor = config.get("tensor_parallel")
    if isinstance(tensor, Mapping) and int(tensor.get("autotp_size") or 0) > 1:
        raise NotPlayed("tensor_parallel.autotp_size above 1 cannot be played without DeepSpeed")
    if int(config.get("sequence_parallel_size") or 1) > 1:
        raise NotPlayed("sequence_parallel_size above 1 cannot be played without DeepSpeed")
    for path in (
        ("expert_parallel", "enabled"),
        ("hybrid_engine", "enabled"),
        ("curriculum_learning", "enabled"),
        ("progressive_layer_drop", "enabled"),
        ("data_efficiency", "enabled"),
    ):
        if enabled(*path):
            raise NotPlayed(f"{path[0]} cannot be played without DeepSpeed")


def _batch_sizes(reader: _Reader, world_size: int) -> tuple[int, int, int]:
    """Micro-batch, accumulation steps and train batch; missing ones computed in DeepSpeed's order.

    Sizes that contradict each other do not stop the plain run: micro-batch and accumulation win.
    """
    train = _size(reader, "train_batch_size")
    micro = _size(reader, "train_micro_batch_size_per_gpu")
    accumulation = _size(reader, "gradient_accumulation_steps")
    if train and micro and not accumulation:
        accumulation = train // micro // world_size
    elif train and not micro:
        micro = train // world_size // (accumulation or 1)
    if not (micro or train):
        reader.notes.append("no batch size in the config: one sample per rank")
    micro, accumulation = max(1, micro or 1), max(1, accumulation or 1)
    product = micro * accumulation * world_size
    if train and train != product:
        reader.notes.append(f"train_batch_size {train} is not {micro} * {accumulation} * {world_size}: took {product}")
    return micro, accumulation, product


def _size(reader: _Reader, key: str) -> int | None:
    value = reader.get("", key)
    try:
        return None if value is None else int(value)
    except (TypeError, ValueError):
        reader.notes.append(f"{key} is {value!r}, not a number: ignored")
        return None


def _precision(reader: _Reader) -> Precision:
    if reader.get("fp16", "enabled", False):
        return "fp16"
    if reader.get("bf16", "enabled", False) or reader.get("bfloat16", "enabled", False):
        return "bf16"
    return "fp32"


def _dtype(reader: _Reader, key: str) -> torch.dtype | None:
    value = reader.get("data_types", key)
    return None if value is None else _DTYPES.get(str(value).removeprefix("torch."))


def _loss_scale(reader: _Reader) -> LossScaleSettings:
    static = float(reader.get("fp16", "loss_scale", 0))
    if static:
        return LossScaleSettings(static=static)
    given = {key: reader.get("fp16", key) for key in _SCALE_KEYS}
    if release.bare_scale_defaults() and all(value is None for value in given.values()):
        return LossScaleSettings(initial=2.0**32, hysteresis=1)
    known = {key: value for key, value in given.items() if value is not None}
    return LossScaleSettings(
        initial=2.0 ** known.get("initial_scale_power", 16),
        window=max(1, int(known.get("loss_scale_window", 1000))),
        hysteresis=int(known.get("hysteresis", 2)),
        consecutive_hysteresis=bool(known.get("consecutive_hysteresis", False)),
        minimum=float(known.get("min_loss_scale", 1)),
    )
