"""Hears of the optimizer steps of a script that has no engine, from torch itself. Runs in rank processes only."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

from torch import nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)


class Host(Protocol):
    """What is told of optimizer steps."""

    def before_optimizer(self) -> None: ...
    def after_optimizer(self, optimizer: Any, *, first: bool) -> None: ...
    def problem(self, error: Exception) -> None: ...


class OptimizerSteps:
    """Hooks on every optimizer of the process, until `detach`; those of other models are left alone.

    `known` tells whether an optimizer of the model has stepped. Several that step by turns count as one step each.
    """

    def __init__(self, model: nn.Module, host: Host) -> None:
        self.known = False
        self._parameters = {id(parameter) for parameter in model.parameters()}
        self._ours: weakref.WeakKeyDictionary[Optimizer, bool] = weakref.WeakKeyDictionary()
        self._host = host
        self._handles = [
            register_optimizer_step_pre_hook(self._before),
            register_optimizer_step_post_hook(self._after),
        ]

    def detach(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _is_ours(self, optimizer: Optimizer) -> bool:
        known = self._ours.get(optimizer)
        if known is None:
            groups = optimizer.param_groups
            known = any(id(parameter) in self._parameters for group in groups for parameter in group["params"])
            self._ours[optimizer] = known
        return known

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        try:
            if self._is_ours(optimizer):
                self._host.before_optimizer()
        except Exception as error:
            self._host.problem(error)

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        try:
            if self._is_ours(optimizer):
                first, self.known = not self.known, True
                self._host.after_optimizer(optimizer, first=first)
        except Exception as error:
            self._host.problem(error)
