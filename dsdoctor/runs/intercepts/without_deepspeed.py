"""The names of DeepSpeed in a run without it: engine class for `isinstance`, ZeRO contexts that do nothing."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from dsdoctor.runs.session import RankSession


class NullContext:
    """Takes the arguments of `zero.Init` and `GatheredParameters`, and does nothing: parameters are whole anyway."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> NullContext:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def attach(session: RankSession, deepspeed: ModuleType) -> None:
    """Patch the modules of DeepSpeed that a script, Accelerate or Transformers look names up in."""
    from dsdoctor.runs import plain

    session.patch(deepspeed, "DeepSpeedEngine", plain.PlainEngine)
    session.patch(deepspeed.runtime.engine, "DeepSpeedEngine", plain.PlainEngine)
    for module in (deepspeed.zero, deepspeed.runtime.zero.partition_parameters):
        for name in ("Init", "GatheredParameters"):
            session.patch(module, name, NullContext)
        session.patch(module, "register_external_parameter", _nothing)
    replacements = {
        "safe_get_full_fp32_param": lambda parameter: parameter.detach().float(),
        "safe_get_full_grad": lambda parameter: None if parameter.grad is None else parameter.grad.float(),
        "safe_get_full_optimizer_state": _nothing,
    }
    for name, replacement in replacements.items():
        if hasattr(deepspeed.utils, name):
            session.patch(deepspeed.utils, name, replacement)


def _nothing(*_: Any, **__: Any) -> None:
    pass
