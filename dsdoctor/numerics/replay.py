"""Runs one module's forward again to find the operation that made its bad value. Runs in rank processes only.

The module has just run, so its inputs and (gathered) weights are at hand. The second run happens without gradients and
without hooks, from the same random state, and everything it could leave behind is put back. A dispatch mode follows
each bad value from the operation that made it through all that it spoils, so a healthy -inf mask that never reaches the
output cannot be named. A module whose second run would communicate with other ranks is left alone.
"""

from __future__ import annotations

import contextlib
import linecache
import os
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from dsdoctor.numerics import causes, trees
from dsdoctor.numerics.engines import is_gathered
from dsdoctor.numerics.events import Origin
from dsdoctor.numerics.stats import measure, only_minus_inf

COMMUNICATION = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem")
NOT_THE_PROGRAM = tuple(os.path.dirname(file) + os.sep for file in (torch.__file__, __file__))
_PLAIN = (Tensor, bool, int, float, complex, str, bytes, torch.dtype, torch.device, type(None))
_HOOKS = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)


_NOT_AGAIN = Origin(cause="not-reproducible", detail="a second run of the module did not show the value again")


class NotReplayable(Exception):
    """The module cannot be run a second time without a risk for the user's run."""


class _Reached(Exception):
    """The second run got as far as the submodule whose input is looked for."""


@dataclass(frozen=True, slots=True)
class RandomState:
    """The random generators as they were before a module's forward."""

    cpu: Tensor
    cuda: Tensor | None

    @classmethod
    def now(cls) -> RandomState:
        used = torch.cuda.is_available() and torch.cuda.is_initialized()
        return cls(torch.get_rng_state(), torch.cuda.get_rng_state() if used else None)

    def restore(self) -> None:
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda)


@dataclass(frozen=True, slots=True)
class _Operand:
    """A bad operand: where its value comes from, and how bad it is."""

    origin: Origin
    has_nan: bool
    only_minus: bool


class Tracer(TorchDispatchMode):
    """Knows for each storage with a bad value where that came from.

    Tensors with bad values are kept alive to the end, so that no storage's address is used twice. `communicates` lets
    operations pass that talk to other ranks, which a second run must not reach. `last_scalar` is the bad tensor of one
    element that was made last.
    """

    def __init__(self, module: nn.Module, *, communicates: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.last_scalar: Tensor | None = None
        self._origins: dict[int, Origin] = {}
        self._communicates = communicates
        self._names = {_storage(tensor): name for name, tensor in [*module.named_buffers(), *module.named_parameters()]}
        self._kept: list[Tensor] = []
        self._lost: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace in COMMUNICATION:
            if self._communicates:
                return func(*args, **kwargs)
            raise NotReplayable("it communicates with other ranks")
        operands = self._bad_operands((args[1:], kwargs) if causes.overwrites(func) else (args, kwargs))
        before = tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, args) if causes.mutates(func) else args
        result = func(*args, **kwargs)
        self._lost += causes.lost_constants(func, args, kwargs)
        if not causes.is_view(func):
            for output in tree_leaves(result):
                if isinstance(output, Tensor):
                    self._note(output, func, before, kwargs, operands)
        return result

    def origin(self, tensor: Tensor) -> Origin | None:
        """Where a bad value in this tensor came from, None where it was not seen."""
        return self._origins.get(_storage(tensor))

    def _bad_operands(self, values: Any) -> list[_Operand]:
        found = []
        for operand in tree_leaves(values):
            seen = measure(operand) if isinstance(operand, Tensor) else None
            if seen is not None and seen.kind is not None:
                minus = only_minus_inf(operand)
                origin = self._origins.get(_storage(operand)) or self._from_outside(operand, deliberate=minus)
                found.append(_Operand(origin, "nan" in seen.kind, minus))
        return found

    def _from_outside(self, operand: Tensor, *, deliberate: bool) -> Origin:
        name = self._names.get(_storage(operand))
        if name is None or deliberate:
            return Origin(detail="the value came into the module from outside", deliberate=deliberate)
        return Origin(cause="corrupted-weights", detail=f"{name} itself is not finite")

    def _note(self, output: Tensor, func: Any, args: Any, kwargs: Any, operands: list[_Operand]) -> None:
        seen = measure(output)
        if seen is None or seen.kind is None:
            if output.numel() * output.element_size() == output.untyped_storage().nbytes():
                self._origins.pop(_storage(output), None)
            return
        self._kept.append(output)
        self.last_scalar = output if output.dim() == 0 else self.last_scalar
        origin = _inherited("nan" in seen.kind, only_minus_inf(output), operands)
        if origin is None:
            of_input = any(operand.origin.op is None for operand in operands)
            origin = replace(self._made(func, args, kwargs, output), of_input=of_input)
        self._origins[_storage(output)] = origin

    def _made(self, func: Any, args: Any, kwargs: Any, output: Tensor) -> Origin:
        """The origin of a bad value that this operation made, with the line of the program that called it."""
        origin = causes.explain(func, args, kwargs, output)
        if origin.cause == "domain" and self._lost:
            origin = replace(origin, cause="lost-eps", detail=f"{origin.detail}; {self._lost[-1]}")
        seen = measure(output)
        kind = seen.kind if seen is not None else None
        return replace(origin, kind=kind, detail=origin.detail + _place(output), line=calling_line())


def _inherited(nan: bool, only_minus: bool, operands: list[_Operand]) -> Origin | None:
    """The origin that an operand hands on, or None where this operation made the value out of good operands.

    A deliberate -inf explains a -inf, but neither +inf nor NaN: those were made of it here (a row that is all masked).
    """
    relevant = [o for o in operands if o.has_nan] if nan else operands
    relevant = relevant or operands
    made = next((o.origin for o in relevant if not o.origin.deliberate), None)
    if made is not None or not relevant:
        return made
    return relevant[0].origin if only_minus else None


def _place(output: Tensor) -> str:
    """The index of the first bad element of a tensor, and how many there are."""
    bad = ~output.detach().isfinite() if output.is_floating_point() and output.dim() else None
    count = int(bad.sum()) if bad is not None and output.layout is torch.strided else 0
    if bad is None or not count:
        return ""
    index = [int(i) for i in bad.nonzero()[0]]
    return f"; {count} of {output.numel()} elements, the first at {index}"


def calling_line() -> str | None:
    """The innermost line that runs now outside of torch and of the detector, as `file:number: text`."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((*NOT_THE_PROGRAM, "<")):
            text = linecache.getline(file, frame.f_lineno).strip()
            return f"{file}:{frame.f_lineno}: {text}" if text else f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return None


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def find_origin(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    state: RandomState,
    child: nn.Module | None = None,
) -> Origin:
    """Where the module's bad output came from, or, with `child`, the bad value which that submodule is handed.

    Raises:
        NotReplayable: a second run could communicate, needs weights that are not here, or has arguments with a state.
    """
    _check(module, args, kwargs)
    with undone(module, state), torch.no_grad():
        tracer = Tracer(module)
        sink: list[Tensor] = []
        strip_hooks(module, child, sink)
        with contextlib.suppress(_Reached), tracer:
            output = module.forward(*args, **kwargs)
            sink = [leaf for _, leaf in trees.leaves(output, "output") if isinstance(leaf, Tensor)]
        found = [tracer.origin(tensor) for tensor in sink if tensor.layout is torch.strided]
    origins = [origin for origin in found if origin is not None]
    made = next((origin for origin in origins if not origin.deliberate), None)
    return made or (origins[0] if origins else _NOT_AGAIN)


def _check(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    if not all(is_gathered(parameter) for parameter in module.parameters()):
        raise NotReplayable("its weights are partitioned and not gathered now")
    if not all(isinstance(leaf, _PLAIN) for leaf in tree_leaves((args, dict(kwargs)))):
        raise NotReplayable("an argument carries a state")


def strip_hooks(module: nn.Module, child: nn.Module | None, sink: list[Tensor]) -> None:
    """Empty the hooks below the module (`undone` brings them back); let the child's call end the run."""

    def reached(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors = [leaf for _, leaf in trees.arguments(args, kwargs) if isinstance(leaf, Tensor)]
        bad = [t for t in tensors if (seen := measure(t)) is not None and seen.kind is not None]
        if bad:
            sink.extend(bad)
            raise _Reached

    for part in module.modules():
        for name in _HOOKS:
            part.__dict__[name] = OrderedDict()
    if child is not None:
        child.register_forward_pre_hook(reached, with_kwargs=True)


@contextlib.contextmanager
def undone(module: nn.Module, state: RandomState) -> Iterator[None]:
    """Run from the given random state on copies of the buffers; put back attributes and random state afterwards."""
    now = RandomState.now()
    attributes = [(part, dict(part.__dict__)) for part in module.modules()]
    contents = [(box, box.copy()) for _, values in attributes for box in _boxes(values)]
    try:
        for part, _ in attributes:
            part._buffers.update({name: b.clone() for name, b in part._buffers.items() if b is not None})
        state.restore()
        yield
    finally:
        for part, values in attributes:
            part.__dict__.clear()
            part.__dict__.update(values)
        for box, copy in contents:
            _refill(box, copy)
        now.restore()


def _boxes(attributes: dict[str, Any]) -> Iterator[Any]:
    """The buffers, and what else a forward may add to: plain lists, dicts and sets among a module's attributes."""
    for name, value in attributes.items():
        if name == "_buffers" or (type(value) in (list, dict, set) and not name.startswith("_")):
            yield value


def _refill(box: Any, copy: Any) -> None:
    box.clear()
    if isinstance(box, list):
        box.extend(copy)
    else:
        box.update(copy)
