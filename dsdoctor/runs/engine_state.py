"""What an engine says of itself around an optimizer step, over the releases of DeepSpeed and for the plain engine.

Runs in rank processes only; torch is imported by the script before.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class State:
    """One look at an engine. `scaler_decides` marks a scale that torch's GradScaler keeps, see `was_skipped`."""

    skipped_steps: int
    loss_scale: float | None
    scaler_decides: bool
    grad_norm: float | None
    lr: float | None


def read(engine: Any) -> State:
    """Look at the engine; values that it does not have are None."""
    scaler = _grad_scaler(engine)
    return State(
        skipped_steps=int(getattr(engine, "skipped_steps", 0) or 0),
        loss_scale=_number(scaler.get_scale()) if scaler is not None else _wrapper_scale(engine.optimizer),
        scaler_decides=scaler is not None,
        grad_norm=_grad_norm(engine),
        lr=_learning_rate(engine),
    )


def was_skipped(before: State, after: State) -> bool:
    """Whether the step between two looks left the weights alone.

    The engine counts the steps that it skipped, but those that torch's GradScaler drops (`torch_autocast` in fp16)
    are not counted in several releases: there a scale that fell tells.
    """
    if after.skipped_steps > before.skipped_steps:
        return True
    if not after.scaler_decides or before.loss_scale is None or after.loss_scale is None:
        return False
    return after.loss_scale < before.loss_scale


def owns_boundary(engine: Any) -> bool:
    """The script itself decides where accumulation ends: every `step()` is then an attempted one."""
    managed = getattr(type(engine), "managed_gradient_accumulation", None)
    return managed is not None and not managed(engine)


def numbers(values: Iterable[Any]) -> tuple[float, ...]:
    """The numbers in one-element tensors; whatever is not one is left out."""
    found = (_number(value) for value in values)
    return tuple(value for value in found if value is not None)


def resident_bytes() -> int:
    """Resident size of this process; 0 where the system does not tell."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    return 0


def device_bytes() -> int:
    """Highest number of bytes that torch had allocated on this rank's GPU so far; 0 without one."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return 0
    return int(torch.cuda.max_memory_allocated())


def _grad_scaler(engine: Any) -> Any:
    """torch's GradScaler, where `torch_autocast` in fp16 put one into the engine (ZeRO 0) or its optimizer."""
    scaler = getattr(engine, "torch_autocast_z0_gradscaler", None)
    return scaler if scaler is not None else getattr(engine.optimizer, "torch_autocast_gradscaler", None)


def _wrapper_scale(optimizer: Any) -> float | None:
    """The loss scale of DeepSpeed's optimizer wrappers; the place differs by wrapper and release."""
    for holder in (getattr(optimizer, "loss_scale_config", None), optimizer, getattr(optimizer, "loss_scaler", None)):
        scale = _number(getattr(holder, "cur_scale", None))
        if scale is not None:
            return scale
    return None


def _grad_norm(engine: Any) -> float | None:
    ask = getattr(type(engine), "get_global_grad_norm", None)
    return _number(ask(engine)) if ask is not None else None


def _learning_rate(engine: Any) -> float | None:
    groups = getattr(engine.optimizer, "param_groups", None)
    return _number(groups[0].get("lr")) if groups else None


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        return None
