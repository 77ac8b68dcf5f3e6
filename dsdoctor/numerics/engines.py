"""What the detector asks an engine: its loss scale, whether a step was skipped, its reduced gradients, its model.

Everything is read from plain attributes, nothing here runs a collective. The names are those of DeepSpeed's engine and
optimizer wrappers over its releases, and of the plain engine. Runs in rank processes only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Scale:
    """The loss scale that backward multiplies with. `floor` is the lowest value the search may reach."""

    value: float
    dynamic: bool
    floor: float

    @property
    def searching(self) -> bool:
        """Whether an overflow of the gradients alone may just be the search trying this scale."""
        return self.dynamic and self.value > self.floor


def is_engine(candidate: Any) -> bool:
    """Whether it trains the way DeepSpeed's engine does."""
    names = ("backward", "step", "is_gradient_accumulation_boundary")
    return isinstance(getattr(candidate, "module", None), nn.Module) and all(
        callable(getattr(candidate, name, None)) for name in names
    )


def user_model(candidate: Any) -> nn.Module:
    """The module as the user built it, without wrappers of engines, DDP or torch.compile.

    Raises:
        TypeError: there is no module, it is scripted, or `nn.DataParallel` is in it, whose replicas drop hooks.
    """
    model = candidate.module if is_engine(candidate) else candidate
    while isinstance(model, nn.parallel.DistributedDataParallel) or hasattr(model, "_orig_mod"):
        model = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model._orig_mod
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected an engine or a torch.nn.Module, not {type(candidate).__name__}")
    if any(isinstance(module, nn.DataParallel) for module in model.modules()):
        raise TypeError(
            "nn.DataParallel replicates the model in every forward and its replicas drop hooks; "
            "use DistributedDataParallel (one process per device) instead"
        )
    if not takes_hooks(model):
        raise TypeError("a scripted model takes no hooks; attach to the module that was scripted")
    return model


def is_compiled(module: Any) -> bool:
    """Whether torch.compile was asked to compile this module's forward."""
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def has_compiled_parts(candidate: Any) -> bool:
    """Whether torch.compile was asked for the model of an engine, the model itself or a part of it."""
    model = candidate.module if is_engine(candidate) else candidate
    return any(is_compiled(part) for part in model.modules())


def takes_hooks(module: nn.Module) -> bool:
    """False for TorchScript modules, which are left alone."""
    return not isinstance(module, torch.jit.ScriptModule)


def rank() -> int:
    """This process's rank, 0 where nothing is distributed."""
    distributed = torch.distributed
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0


def world_size() -> int:
    """How many ranks there are, 1 where nothing is distributed."""
    distributed = torch.distributed
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def is_pipeline(engine: Any) -> bool:
    """Whether its stages run forward and backward by a schedule of the engine's own."""
    return hasattr(engine, "_exec_schedule") and hasattr(engine, "_take_model_step")


def pipeline_loss(engine: Any) -> Tensor | None:
    """The last micro-batch's loss, on a pipeline's last stage."""
    loss = getattr(engine, "loss", None) if is_pipeline(engine) else None
    return loss if isinstance(loss, Tensor) else None


def autocast_in_force() -> tuple[str, torch.dtype] | None:
    """Device and type of the autocast region that the program is in, None outside of one."""
    for device in ("cuda", "cpu") if torch.cuda.is_available() else ("cpu",):
        if hasattr(torch, "get_autocast_dtype"):
            on, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        elif device == "cuda":
            on, dtype = torch.is_autocast_enabled(), torch.get_autocast_gpu_dtype()
        else:
            on, dtype = torch.is_autocast_cpu_enabled(), torch.get_autocast_cpu_dtype()
        if on:
            return device, dtype
    return None


def loss_scale(engine: Any) -> Scale:
    """The scale in force, 1 where nothing scales. A scale of which nobody says that it is static counts as dynamic."""
    optimizer = getattr(engine, "optimizer", None)
    for scaler in (
        getattr(engine, "torch_autocast_z0_gradscaler", None),
        getattr(optimizer, "torch_autocast_gradscaler", None),
    ):
        if scaler is not None and callable(getattr(scaler, "get_scale", None)):
            return Scale(value=float(scaler.get_scale()), dynamic=True, floor=1.0)
    for holder in (getattr(optimizer, "loss_scaler", None), getattr(optimizer, "loss_scale_config", None), optimizer):
        value = getattr(holder, "cur_scale", None)
        if isinstance(value, (int, float)):
            dynamic = getattr(holder, "dynamic", getattr(holder, "dynamic_loss_scale", True))
            floor = getattr(holder, "min_scale", None) or getattr(holder, "min_loss_scale", None) or 1.0
            return Scale(value=float(value), dynamic=bool(dynamic), floor=float(floor))
    return Scale(value=1.0, dynamic=False, floor=1.0)


def skipped_steps(engine: Any) -> int:
    """Steps that the engine skipped so far."""
    value = getattr(engine, "skipped_steps", 0)
    return value if isinstance(value, int) else 0


def steps_taken(engine: Any) -> int | None:
    """Optimizer steps attempted so far, by the engine's own count."""
    value = getattr(engine, "global_steps", None)
    return value if isinstance(value, int) else None


def norm_kind(engine: Any) -> str | None:
    """inf or nan where the engine's gradient norm is not finite (-1 is how some releases write that), else None."""
    value = getattr(engine, "_global_grad_norm", None)
    if isinstance(value, Tensor):
        value = value.item() if value.numel() == 1 else None
    if not isinstance(value, (int, float)) or (math.isfinite(value) and value != -1):
        return None
    return "inf" if math.isinf(value) else "nan"


def reduced_gradients(engine: Any) -> Iterator[tuple[Tensor | None, Tensor]]:
    """This rank's reduced gradients before the step, each with its parameter where that is known.

    Between the backward of the boundary and the step: `grad` of the parameters, or ZeRO's averaged partitions.
    """
    averaged = getattr(getattr(engine, "optimizer", None), "averaged_gradients", None)
    if isinstance(averaged, dict):
        for partition in averaged.values():
            pieces = [partition] if isinstance(partition, Tensor) else partition or []
            yield from ((None, piece) for piece in pieces if isinstance(piece, Tensor))
    for parameter in engine.module.parameters():
        if parameter.grad is not None:
            yield parameter, parameter.grad


def learning_rate(optimizer: Any) -> float | None:
    """The largest learning rate of an optimizer's groups, None where that is not a plain number."""
    groups = getattr(optimizer, "param_groups", None)
    rates = [group.get("lr") for group in groups if isinstance(group, dict)] if isinstance(groups, list) else []
    known = [float(rate) for rate in rates if isinstance(rate, (int, float))]
    return max(known) if known and len(known) == len(rates) else None


def checks_gradients(engine: Any) -> bool:
    """Whether the engine waits in its step for the gradients' overflow flag, and skips the step where it is set."""
    optimizer = getattr(engine, "optimizer", None)
    return bool(getattr(optimizer, "check_grad_overflow", False)) or loss_scale(engine).dynamic


def optimizer_state(optimizer: Any, names: dict[int, str]) -> Iterator[tuple[str, str, Tensor]]:
    """Module, name and value of what the innermost optimizer holds: master weights that are not the model's, moments.

    `names` are the model's parameters by id; state that belongs to none of them (ZeRO's flat partitions) has no module.
    """
    while getattr(optimizer, "optimizer", None) is not None:
        optimizer = optimizer.optimizer
    if not isinstance(optimizer, torch.optim.Optimizer):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            module, _, label = names.get(id(parameter), "").rpartition(".")
            if not label:
                yield "", "master weights", parameter.detach()
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor) and value.numel() > 1:
                    yield module, f"{key} of {label}" if label else f"{key} of the optimizer", value


def local_weights(parameter: Tensor) -> Tensor | None:
    """What this rank holds of a parameter: all of it, or its ZeRO-3 shard. None where that is not in memory."""
    shard = getattr(parameter, "ds_tensor", None)
    if shard is None:
        return parameter
    status = getattr(shard, "status", None)
    return shard if status is None or getattr(status, "name", "") == "AVAILABLE" else None


def is_whole(model: nn.Module) -> bool:
    """Whether this rank holds every weight in full now: none partitioned by ZeRO-3, sharded by FSDP or a DTensor."""
    sharded = any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules())
    return not sharded and all(is_gathered(p) and not hasattr(p, "to_local") for p in model.parameters())


def is_gathered(parameter: Tensor) -> bool:
    """False for a ZeRO-3 parameter whose data is not there now."""
    status = getattr(parameter, "ds_status", None)
    return status is None or getattr(status, "name", "") == "AVAILABLE"
