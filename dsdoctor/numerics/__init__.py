"""The detector of the first non-finite value. Imports torch only when one of its names is used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dsdoctor.numerics.attaching import attach
    from dsdoctor.numerics.detector import Detector
    from dsdoctor.numerics.drop_in import DebugUnderflowOverflow
    from dsdoctor.numerics.stats import detect_overflow

__all__ = ["DebugUnderflowOverflow", "Detector", "attach", "detect_overflow"]
_HOMES = {
    "DebugUnderflowOverflow": "drop_in",
    "Detector": "detector",
    "attach": "attaching",
    "detect_overflow": "stats",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
