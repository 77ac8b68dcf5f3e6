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

from dsdoctor.numerics.hooks import RunEnded, remove
from dsdoctor.numerics.stats import Range, measure


@dataclass(slots=True, eq=False)
class Activation:
    """A tensor in flight: who made it, who called that, who takes it. Holds no reference to the tensor.

    `moment` is the batch and the micro-step that it belongs to.
    """

    tensor: weakref.ref[Tensor]
    path: str
    moment: tuple[int, int]
    caller: str = ""
    takers: list[tuple[str, str]] = field(default_factory=list)

    def blamed(self) -> tuple[str, str]:
        """Module and tensor to name if this gradient is the first bad one: the innermost taker, else the caller."""
        return self.takers[-1] if self.takers else (self.caller, self.path)


@dataclass(slots=True, eq=False)
class Weight:
    """A parameter: its own module is to blame for its gradient."""

    module: str
    path: str

    def blamed(self) -> tuple[str, str]:
        return self.module, self.path


Look = Callable[[Tensor, Activation | Weight], None]
"""Called with each gradient and whose it is. It must not change the gradient."""
Report = Callable[[str, str, Range, torch.dtype, float], None]
"""Called with module, tensor, what was found, its type, and the largest clean gradient before."""


class GradientWatch:
    """Tensor hooks on what modules take and return, and on the parameters. `look` is called with every gradient."""

    def __init__(self, look: Look, guard: Callable[[Exception], None]) -> None:
        self._look = look
        self._guard = guard
        self._activations: dict[int, Activation] = {}
        self._handles: list[Any] = []
        self._active = True
        self._moment = (0, 0)

    def watch_parameters(self, module: nn.Module, name: str, hooked: set[int]) -> None:
        """Hook the trainable parameters that the module itself owns, unless they are hooked already (shared ones are).

        Their gradients are this rank's own, before any reduction.
        """
        for label, parameter in module._parameters.items():
            if parameter is not None and parameter.requires_grad and id(parameter) not in hooked:
                hooked.add(id(parameter))
                hook = self._hook_for(Weight(name, f"{label}.grad"))
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

    def forget(self, moment: tuple[int, int] = (0, 0)) -> None:
        """Drop the notes about activations: a new forward begins, of this batch and micro-step."""
        self._activations.clear()
        self._moment = moment

    def detach(self) -> None:
        """Remove the hooks on parameters; those on tensors of a living graph turn inert."""
        self._active = False
        remove(self._handles)
        self._activations.clear()

    def _find(self, tensor: Tensor, path: str) -> Activation | None:
        if not tensor.requires_grad or isinstance(tensor, nn.Parameter):
            return None
        known = self._activations.get(id(tensor))
        if known is not None and known.tensor() is tensor:
            return known
        known = Activation(weakref.ref(tensor), path, self._moment)
        self._activations[id(tensor)] = known
        tensor.register_hook(self._hook_for(known))
        return known

    def _hook_for(self, owner: Activation | Weight) -> Callable[[Tensor], None]:
        def hook(gradient: Tensor) -> None:
            if not self._active or torch.compiler.is_compiling():
                return
            try:
                self._look(gradient, owner)
            except RunEnded:
                raise
            except Exception as error:
                self._guard(error)

        return hook


class MeasuredGradients:
    """Measures every gradient until one is bad, which is reported.

    `seen` counts the gradients measured since `reset`, `bad` tells whether one of them was not finite, `largest` is the
    largest magnitude of a finite one.
    """

    def __init__(self, report: Report) -> None:
        self._report = report
        self.reset()

    def reset(self) -> None:
        """Forget what was seen."""
        self.seen = 0
        self.bad = False
        self.largest = 0.0

    def look(self, gradient: Tensor, owner: Activation | Weight) -> None:
        found = None if self.bad else measure(gradient)
        if found is None:
            return
        self.seen += 1
        if found.kind is None:
            self.largest = max(self.largest, found.high)
            return
        self.bad = True
        module, label = owner.blamed()
        self._report(module, label, found, gradient.dtype, self.largest)
