"""dsdoctor: the troubleshooting assistant for DeepSpeed training.

The Python API is imported when it is first used: importing `dsdoctor` imports neither torch nor DeepSpeed.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dsdoctor.analysis import analyze_log
    from dsdoctor.linting import lint_config
    from dsdoctor.memory.analysis import estimate_memory
    from dsdoctor.numerics import DebugUnderflowOverflow, attach, detect_overflow

__version__ = "0.1.0"
__all__ = [
    "DebugUnderflowOverflow",
    "__version__",
    "analyze_log",
    "attach",
    "detect_overflow",
    "estimate_memory",
    "lint_config",
]
_HOMES = {
    "analyze_log": "analysis",
    "attach": "numerics",
    "detect_overflow": "numerics",
    "estimate_memory": "memory.analysis",
    "lint_config": "linting",
    "DebugUnderflowOverflow": "numerics",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
