"""The parameters of the optimizers and schedulers that a ds_config can name.

Part of `introspect`, so it runs in a process of its own: importing it imports DeepSpeed and torch. Signatures of
DeepSpeed's classes come from their source text, since importing them may compile kernels.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import types
from pathlib import Path
from typing import Any

import deepspeed

ROOT = Path(deepspeed.__file__).parent


def signature(file: str, class_name: str) -> dict[str, Any] | None:
    """Parameters of a class's constructor, read from its source without importing it."""
    path = ROOT / file
    if not path.exists():
        return None
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef) and node.name == class_name:
            init = next(n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__")
            names = [a.arg for a in init.args.args + init.args.kwonlyargs][2:]
            return {"params": names} | ({"open": True} if init.args.kwarg else {})
    return None


DEEPSPEED_OPTIMIZERS = {
    "FusedAdam": "ops/adam/fused_adam.py",
    "DeepSpeedCPUAdam": "ops/adam/cpu_adam.py",
    "FusedLamb": "ops/lamb/fused_lamb.py",
    "DeepSpeedCPUAdagrad": "ops/adagrad/cpu_adagrad.py",
    "FusedLion": "ops/lion/fused_lion.py",
    "DeepSpeedCPULion": "ops/lion/cpu_lion.py",
    "OnebitAdam": "runtime/fp16/onebit/adam.py",
    "ZeroOneAdam": "runtime/fp16/onebit/zoadam.py",
    "OnebitLamb": "runtime/fp16/onebit/lamb.py",
}
SCHEDULERS = ("LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR")


def read_optimizers() -> dict[str, Any]:
    config = importlib.import_module("deepspeed.runtime.config")
    classes = {name: signature(file, name) for name, file in DEEPSPEED_OPTIMIZERS.items()}
    return {
        "names": sorted(name.lower() for name in config.DEEPSPEED_OPTIMIZERS),
        "classes": {name: found for name, found in classes.items() if found},
    }


def read_schedulers() -> dict[str, Any]:
    found = {name: signature("runtime/lr_schedules.py", name) for name in SCHEDULERS}
    return {name: entry for name, entry in found.items() if entry}


def torch_signatures(module: types.ModuleType, base: type) -> dict[str, Any]:
    """Constructor parameters of torch's own optimizers or schedulers, which a config can name too."""
    found = {}
    for name, value in sorted(vars(module).items()):
        if inspect.isclass(value) and issubclass(value, base) and value is not base and not name.startswith("_"):
            names = list(inspect.signature(value.__init__).parameters)[2:]
            found[name] = {"params": [n for n in names if n != "kwargs"]}
    return found
