"""The model's precision: the cast that the config asks for, and fp32 master weights for low-precision parameters.

Runs in rank processes only (imports torch).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dsdoctor.runs.plain import release
from dsdoctor.runs.plain.errors import NotPlayed
from dsdoctor.runs.plain.settings import Settings

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_HALVES = (torch.float16, torch.bfloat16)


def prepare(module: nn.Module, settings: Settings, device: torch.device) -> None:
    """Cast, move to the device and make all ranks start from rank 0's parameters, as DeepSpeed does.

    Buffers are neither broadcast nor (in releases that leave them alone) cast; integer and complex ones never.
    """
    _refuse_partitioned(module)
    if settings.model_dtype is not None:
        _cast(module.parameters(), settings.model_dtype)
        if settings.buffers_in is not None or release.casts_buffers():
            _cast(module.buffers(), settings.buffers_in or settings.model_dtype)
    module.to(device)
    if dist.get_world_size() > 1:
        for parameter in module.parameters():
            _broadcast(parameter)


def _refuse_partitioned(module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        if hasattr(parameter, "ds_id"):
            raise NotPlayed(f"{name} was partitioned by deepspeed.zero.Init, which only DeepSpeed can run")
        if getattr(parameter, "allreduce", True) is False:
            raise NotPlayed(f"{name} belongs to a DeepSpeed MoE layer, whose experts differ between ranks")


def _cast(tensors: Iterable[Tensor], dtype: torch.dtype) -> None:
    for tensor in tensors:
        if tensor.dtype in _FLOATS and tensor.dtype != dtype:
            tensor.data = tensor.data.to(dtype)


def _broadcast(parameter: Tensor) -> None:
    data = parameter.data.contiguous()
    dist.broadcast(torch.view_as_real(data) if data.is_complex() else data, src=0)
    if data.data_ptr() != parameter.data_ptr():
        parameter.data.copy_(data)


def cast_inputs(value: Any) -> Any:
    """Floating tensors in fp16, inside tuples, lists and dicts too: what `fp16.auto_cast` does to the inputs."""
    if isinstance(value, (list, tuple)):
        return type(value)(cast_inputs(item) for item in value)
    if isinstance(value, dict):
        return {key: cast_inputs(item) for key, item in value.items()}
    return value.half() if isinstance(value, Tensor) and value.is_floating_point() else value


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A parameter of the model and what the optimizer updates for it: an fp32 copy, or the parameter itself."""

    parameter: Tensor
    master: Tensor

    @property
    def copied(self) -> bool:
        return self.master is not self.parameter


def attach_masters(optimizer: torch.optim.Optimizer) -> list[Pair]:
    """Make the optimizer update fp32 masters instead of fp16/bf16 parameters; its groups and state stay.

    Parameters frozen at this moment leave the optimizer, since DeepSpeed fixes then what it trains. A parameter that
    is fp32 (or complex) already is its own master.
    """
    pairs = []
    for group in optimizer.param_groups:
        trained = [_pair(parameter) for parameter in group["params"] if parameter.requires_grad]
        for pair in trained:
            if pair.copied and pair.parameter in optimizer.state:
                optimizer.state[pair.master] = _widened(optimizer.state.pop(pair.parameter))
        group["params"][:] = [pair.master for pair in trained]
        pairs += trained
    return pairs


def _pair(parameter: Tensor) -> Pair:
    if parameter.dtype not in _HALVES:
        return Pair(parameter=parameter, master=parameter)
    return Pair(parameter=parameter, master=parameter.detach().float().requires_grad_(True))


def _widened(state: dict[str, Any]) -> dict[str, Any]:
    return {k: v.float() if isinstance(v, Tensor) and v.dtype in _HALVES else v for k, v in state.items()}
