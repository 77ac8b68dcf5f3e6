"""The control run in fp32: what the script itself made in half precision is brought to fp32."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from dsdoctor.runs.imports import ImportHooks
from dsdoctor.runs.observe import CastInputs
from dsdoctor.runs.session import RankSession


def install(session: RankSession, hooks: ImportHooks) -> None:
    """Switch off the script's own autocast regions in the control."""
    if session.spec.precision == "fp32":
        hooks.after_import("torch.amp.autocast_mode", lambda module: _no_autocast(session, module))


def _no_autocast(session: RankSession, module: ModuleType) -> None:
    kind = module.autocast
    original = kind.__init__

    @functools.wraps(original)
    def init(this: Any, device_type: str, dtype: Any = None, enabled: bool = True, *args: Any, **kwargs: Any) -> None:
        if enabled:
            session.note("control in fp32: autocast regions are switched off")
        original(this, device_type, dtype, False, *args, **kwargs)

    session.patch(kind, "__init__", init)


def dtype() -> Any:
    import torch

    return torch.float32


def cast_model(session: RankSession, model: Any) -> None:
    """Cast a model that the script built or loaded in half precision; parameters keep their identity."""
    import torch

    half = (torch.float16, torch.bfloat16)
    with session.guard("cast the model to fp32"):
        if any(tensor.dtype in half for tensor in (*model.parameters(), *model.buffers())):
            model.float()
            session.note("control in fp32: the script hands over a model in half precision, cast to fp32")


def input_cast(session: RankSession) -> CastInputs:
    """A function that casts half-precision inputs of the engine to fp32, as the model is."""
    import torch

    half = (torch.float16, torch.bfloat16)

    def cast(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if value.dtype not in half:
                return value
            session.note("control in fp32: the script feeds half-precision inputs, cast to fp32")
            return value.float()
        if isinstance(value, dict):
            return type(value)((key, cast(item)) for key, item in value.items()) if _has_half(value) else value
        if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
            return type(value)(cast(item) for item in value) if _has_half(value) else value
        return value

    def _has_half(value: Any) -> bool:
        if isinstance(value, torch.Tensor):
            return value.dtype in half
        items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
        return any(_has_half(item) for item in items)

    def cast_inputs(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        with session.guard("cast the inputs to fp32"):
            return tuple(cast(value) for value in args), {name: cast(value) for name, value in kwargs.items()}
        return args, kwargs

    return cast_inputs
