"""Which operation's derivative made the first bad value of a backward. Runs in rank processes only.

Each node of the graph of one more run, on copies, is watched: the first one that was handed finite gradients and gave
one that is not finite. Anomaly mode without its own check keeps the line of the forward with each node.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dsdoctor.numerics.bench import Bench
from dsdoctor.numerics.replay import NOT_THE_PROGRAM
from dsdoctor.numerics.stats import measure

_NAME = re.compile(r"(?P<name>\w+?)Backward\d*$")
_LINE = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in .*\n\s+(?P<text>.+)')
_LARGEST = 100_000
"""Nodes of a graph that are watched."""


def derivative(bench: Bench) -> tuple[str, str | None] | None:
    """The operation as `aten.sqrt`, and the line of the program that called it; None where no node is the one."""
    found: list[Any] = []
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        bench.run(inspect=lambda roots: _watch(roots, found))
    match = _NAME.match(found[0].name()) if found else None
    if match is None:
        return None
    lines = [line for text in found[0].metadata.get("traceback_", ()) for line in _LINE.finditer(text)]
    own = [line for line in lines if not line["file"].startswith((*NOT_THE_PROGRAM, "<"))]
    place = f"{own[-1]['file']}:{own[-1]['line']}: {own[-1]['text'].strip()}" if own else None
    return f"aten.{_snake(match['name'])}", place


def _watch(roots: list[Tensor], found: list[Any]) -> None:
    """Hook every node behind the outputs; the first culprit is appended."""
    nodes = [tensor.grad_fn for tensor in roots if tensor.grad_fn is not None]
    seen = set(nodes)
    while nodes and len(seen) < _LARGEST:
        node = nodes.pop()
        node.register_hook(_judge(node, found))
        behind = [parent for parent, _ in node.next_functions if parent is not None and parent not in seen]
        seen.update(behind)
        nodes += behind


def _judge(node: Any, found: list[Any]) -> Callable[..., None]:
    def judge(made: tuple[Tensor | None, ...], given: tuple[Tensor | None, ...]) -> None:
        if not found and any(map(_bad, made)) and not any(map(_bad, given)):
            found.append(node)

    return judge


def _bad(gradient: Tensor | None) -> bool:
    seen = measure(gradient) if gradient is not None else None
    return seen is not None and seen.kind is not None


def _snake(name: str) -> str:
    """`sqrt` for Sqrt, `native_layer_norm` for NativeLayerNorm."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()
