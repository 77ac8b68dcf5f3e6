"""Which compiled DeepSpeed ops a config uses. Pure: a config and the name of the accelerator in, names out.

Follows `DeepSpeedEngine._configure_basic_optimizer` and the swap and communication code of DeepSpeed 0.14 to 0.19. An
optimizer that the script builds itself is not seen here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class NeededOp:
    """A builder class of `deepspeed.ops.op_builder`, and what asks for it."""

    builder: str
    needed_by: str


_CPU_OPTIMIZERS = {"adam": "CPUAdam", "adamw": "CPUAdam", "adagrad": "CPUAdagrad", "lion": "CPULion"}
_DEVICE_OPTIMIZERS = {"adam": "FusedAdam", "adamw": "FusedAdam", "lion": "FusedLion", "lamb": "FusedLamb"}


def needed(config: Mapping[str, Any], accelerator: str) -> tuple[NeededOp, ...]:
    """The ops that a job with this config loads, each once."""
    found = {op.builder: op for op in (*_optimizer(config), *_swap(config), *_communication(accelerator))}
    return tuple(found.values())


def _optimizer(config: Mapping[str, Any]) -> Iterator[NeededOp]:
    optimizer = section(config, "optimizer")
    name = str(optimizer.get("type", "")).lower()
    if name in ("adam", "adamw") and section(optimizer, "params").get("torch_adam") is True:
        return
    offloaded = offload_device(config, "offload_optimizer") in ("cpu", "nvme")
    op = _CPU_OPTIMIZERS.get(name) if offloaded else None
    op = op or _DEVICE_OPTIMIZERS.get(name)
    if op is not None:
        yield NeededOp(builder=f"{op}Builder", needed_by="optimizer.type")


def _swap(config: Mapping[str, Any]) -> Iterator[NeededOp]:
    for key in ("offload_optimizer", "offload_param"):
        if offload_device(config, key) == "nvme" and section(config, "zero_optimization").get("stage") == 3:
            yield NeededOp(builder="AsyncIOBuilder", needed_by=f"zero_optimization.{key}.device")


def _communication(accelerator: str) -> Iterator[NeededOp]:
    """On the CPU accelerator `deepspeed.comm` loads its shared-memory op before the process group is made."""
    if accelerator == "cpu":
        yield NeededOp(builder="ShareMemCommBuilder", needed_by="the CPU accelerator")


def offload_device(config: Mapping[str, Any], key: str) -> str:
    """Where `zero_optimization.KEY` puts its part: none, cpu or nvme."""
    return str(section(section(config, "zero_optimization"), key).get("device", "none")).lower()


def section(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """A part of a config that should be an object; an empty one where it is absent or something else."""
    value = config.get(key)
    return value if isinstance(value, Mapping) else {}
