"""Watches gradients of activations and parameters for the first non-finite one. Runs in rank processes only.

Only tensor hooks are used: module backward hooks refuse in-place operations and fire early where no input needs a
gradient. A bad gradient of an activation was made by whatever *used* that activation, so the module that took it as
input is named; if no module did, the code of the module around it is.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dsdoctor.numerics.stats import Range, measure

Report = Callable[[str, str, Range, torch.dtype, float], None]
"""Called with module, tensor, what was found, its type, and the largest clean gradient before."""


@dataclass(slots=True, eq=False)
class _Activation:
    """A tensor in flight: who made it, who called that, who takes it. Holds no reference to the tensor."""

    tensor: weakref.ref[Tensor]
    path: str
    caller: str = ""
    takers: list[tuple[str, str]] = field(default_factory=list)

    def blamed(self) -> tuple[str, str]:
        """Module and tensor to name if this gradient is the first bad one: the innermost taker, else the caller."""
        return self.takers[-1] if self.takers else (self.caller, self.path)


@dataclass(slots=True, eq=False)
class _Weight:
    """A parameter: its own module is to blame for its gradient."""

    module: str
    path: str

    def blamed(self) -> tuple[str, str]:
        return self.module, self.path


class GradientWatch:
    """Tensor hooks on what modules take and return, and on the parameters.

    `seen` counts the gradients measured since `reset`, `bad` tells whether one of them was not finite.
    """

    def __init__(self, report: Report, guard: Callable[[Exception], None]) -> None:
        self._report = report
        self._guard = guard
        self._activations: dict[int, _Activation] = {}
        self._handles: list[Any] = []
        self._active = True
        self.reset()

    def reset(self) -> None:
        """Forget what was seen. The activations' hooks stay with their graph, which frees them."""
        self.seen = 0
        self.bad = False
        self._largest = 0.0

    def watch_parameters(self, module: nn.Module, name: str) -> None:
        """Hook the trainable parameters that the module itself owns. They are local gradients, before any reduction."""
        for label, parameter in module._parameters.items():
            if parameter is not None and parameter.requires_grad:
                hook = self._hook_for(_Weight(name, f"{label}.grad"))
                self._handles.append(parameter.register_hook(hook))

    def produced(self, tensor: Tensor, caller: str, path: str) -> None:
        """Note a module's output. The same tensor handed on by an outer module belongs to that one's caller."""
        known = self._find(tensor, path)
        if known is not None:
            known.caller, known.path = caller, path

    def taken(self, tensor: Tensor, module: str, label: str) -> None:
        """Note an input of a module; an outer module notes it before an inner one."""
        known = self._find(tensor, label)
        if known is not None:
            known.takers.append((module, f"{label}.grad"))

    def forget(self) -> None:
        """Drop the notes about activations (a new forward begins)."""
        self._activations.clear()

    def detach(self) -> None:
        """Remove the hooks on parameters; those on tensors of a living graph turn inert."""
        self._active = False
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._activations.clear()

    def _find(self, tensor: Tensor, path: str) -> _Activation | None:
        if not tensor.requires_grad or isinstance(tensor, nn.Parameter):
            return None
        known = self._activations.get(id(tensor))
        if known is not None and known.tensor() is tensor:
            return known
        known = _Activation(weakref.ref(tensor), path)
        self._activations[id(tensor)] = known
        tensor.register_hook(self._hook_for(known))
        return known

    def _hook_for(self, owner: _Activation | _Weight) -> Callable[[Tensor], None]:
        def hook(gradient: Tensor) -> None:
            if self._active and not self.bad:
                try:
                    self._look(gradient, owner)
                except Exception as error:
                    self._guard(error)

        return hook

    def _look(self, gradient: Tensor, owner: _Activation | _Weight) -> None:
        found = measure(gradient)
        if found is None:
            return
        self.seen += 1
        if found.kind is None:
            self._largest = max(self._largest, found.high)
            return
        self.bad = True
        module, label = owner.blamed()
        self._report(module, label, found, gradient.dtype, self._largest)
