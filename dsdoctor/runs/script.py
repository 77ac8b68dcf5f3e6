"""Run a file or a module as the program: a real `__main__`, so that pickling, spawned workers and type hints work.

Runs in rank processes only; imports no torch.
"""

from __future__ import annotations

import importlib.util
import io
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import CodeType, ModuleType


def run_file(path: str, arguments: Sequence[str]) -> None:
    """What `python path arguments…` does. Relative to the working directory; raises what the script raises."""
    full = os.path.abspath(path)
    sys.argv = [path, *arguments]
    _first_on_path(os.path.dirname(os.path.realpath(full)))
    with io.open_code(full) as file:
        code = compile(file.read(), full, "exec", dont_inherit=True)
    _execute(code, file=full, loader=SourceFileLoader("__main__", full))


def run_module(name: str, arguments: Sequence[str]) -> None:
    """What `python -m name arguments…` does: the working directory comes first on the path, packages work."""
    _first_on_path(os.getcwd())
    sys.argv = ["-m", *arguments]
    code, spec = _module_code(name)
    sys.argv[0] = spec.origin or name
    _execute(code, file=spec.origin, loader=spec.loader, spec=spec)


def _module_code(name: str) -> tuple[CodeType, ModuleSpec]:
    """The code of a module, or of its `__main__` where it is a package."""
    spec = importlib.util.find_spec(name)
    if spec is None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    if spec.submodule_search_locations is not None:
        return _module_code(f"{name}.__main__")
    code = getattr(spec.loader, "get_code", lambda _: None)(name)
    if code is None:
        raise ImportError(f"no code object available for {name}", name=name)
    return code, spec


def _execute(code: CodeType, *, file: str | None, loader: object, spec: ModuleSpec | None = None) -> None:
    module = ModuleType("__main__")
    vars(module).update(
        __builtins__=__builtins__,
        __file__=file,
        __cached__=None,
        __loader__=loader,
        __package__=spec.parent if spec else None,
        __spec__=spec,
        __annotations__={},
    )
    sys.modules["__main__"] = module
    exec(code, vars(module))


def _first_on_path(folder: str) -> None:
    """Put `folder` where Python puts the script's folder; `python -m dsdoctor…` left the working directory there."""
    if getattr(sys.flags, "safe_path", False):
        return
    if sys.path and sys.path[0] in ("", os.getcwd()):
        sys.path[0] = folder
    else:
        sys.path.insert(0, folder)
