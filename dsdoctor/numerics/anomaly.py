"""Which operation's derivative made the first bad value of a backward. Runs in rank processes only.

The nodes of a graph are watched: the first one that was handed finite gradients and gave one that is not finite is the
culprit. Anomaly mode without its own check keeps the line of the forward with each node.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from dsdoctor.numerics.bench import Bench
from dsdoctor.numerics.replay import NOT_THE_PROGRAM, RandomState, Tracer
from dsdoctor.numerics.stats import measure

Culprit = tuple[str, str | None]
"""The operation as `aten.sqrt`, and the line of the program that called it."""
_NAME = re.compile(r"(?P<name>\w+?)Backward\d*$")
_LINE = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in .*\n\s+(?P<text>.+)')
_LARGEST = 100_000
"""Nodes of a graph that are watched."""


def derivative(bench: Bench) -> Culprit | None:
    """The culprit of one more run, on copies; None where no node is the one."""
    found: list[Culprit] = []
    handles: list[Any] = []
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        bench.run(inspect=lambda roots: handles.extend(watch(roots, found)))
    for handle in handles:
        handle.remove()
    return found[0] if found else None


def watch(roots: Iterable[Tensor], found: list[Culprit], *, with_line: bool = False) -> list[Any]:
    """Hook every node behind the tensors, or only those that know their line; the culprit is appended.

    The handles that are returned have to be removed: a node that holds a hook that knows it is never freed.
    """
    handles = []
    nodes: list[Any] = [tensor.grad_fn for tensor in roots if tensor.grad_fn is not None]
    seen = set(nodes)
    while nodes and len(seen) < _LARGEST:
        node = nodes.pop()
        if with_line and "traceback_" not in node.metadata:
            continue
        handles.append(node.register_hook(_judge(node, found)))
        behind = [parent for parent, _ in node.next_functions if parent is not None and parent not in seen]
        seen.update(behind)
        nodes += behind
    return handles


def _judge(node: Any, found: list[Culprit]) -> Callable[..., None]:
    def judge(made: tuple[Tensor | None, ...], given: tuple[Tensor | None, ...]) -> None:
        if not found and any(map(_bad, made)) and not any(map(_bad, given)):
            culprit = _of_the_programs_own(node, given) if isinstance(node, BackwardCFunction) else _named(node)
            found.extend([culprit] if culprit is not None else [])

    return judge


def _named(node: Any) -> Culprit | None:
    """A derivative of torch: the name of its operation, and the line that called it in the forward."""
    match = _NAME.match(node.name())
    if match is None:
        return None
    lines = [line for text in node.metadata.get("traceback_", ()) for line in _LINE.finditer(text)]
    own = [line for line in lines if not line["file"].startswith((*NOT_THE_PROGRAM, "<"))]
    place = f"{own[-1]['file']}:{own[-1]['line']}: {own[-1]['text'].strip()}" if own else None
    return f"aten.{_aten(match['name'])}", place


def _of_the_programs_own(node: Any, given: tuple[Tensor | None, ...]) -> Culprit | None:
    """A `backward` that the program wrote runs once more, with what it still holds, to see the operation inside it."""
    state, tracer, made = RandomState.now(), Tracer(nn.Module()), None
    with contextlib.suppress(Exception), torch.no_grad(), tracer:
        made = node.apply(*given)
    state.restore()
    tensors = [tensor for tensor in (made if isinstance(made, tuple) else (made,)) if isinstance(tensor, Tensor)]
    origins = [origin for tensor in tensors if (origin := tracer.origin(tensor)) is not None]
    return next(((origin.op, origin.line) for origin in origins if origin.op is not None), None)


def _bad(gradient: Tensor | None) -> bool:
    seen = measure(gradient) if gradient is not None else None
    return seen is not None and seen.kind is not None


def _aten(name: str) -> str:
    """`native_layer_norm` for NativeLayerNorm; nodes drop the underscore at the front of `_to_copy`."""
    name = re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()
    return name if hasattr(torch.ops.aten, name) or not hasattr(torch.ops.aten, f"_{name}") else f"_{name}"
