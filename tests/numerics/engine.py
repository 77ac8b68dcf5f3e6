"""An engine with DeepSpeed's habits in sixty lines: accumulation, a loss scale that is searched, skipped steps."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn


class TinyEngine:
    """One rank. `scale` 0 means no loss scaling; `checks` skips steps with non-finite gradients.

    `reduce` may change the gradients between backward and step, as a reduction over ranks would.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        lr: float = 0.01,
        accumulation: int = 1,
        scale: float = 0.0,
        floor: float = 1.0,
        checks: bool = True,
        reduce: Any = None,
    ) -> None:
        self.module = module
        self.skipped_steps = self.global_steps = self.micro_steps = 0
        self._global_grad_norm: float | None = None
        self._accumulation = accumulation
        self._checks = checks
        self._reduce = reduce
        self.optimizer = SimpleNamespace(
            torch=torch.optim.SGD(module.parameters(), lr=lr),
            overflow=False,
            loss_scaler=SimpleNamespace(cur_scale=scale or 1.0, dynamic=scale > 0, min_scale=floor),
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def is_gradient_accumulation_boundary(self) -> bool:
        return (self.micro_steps + 1) % self._accumulation == 0

    def backward(self, loss: torch.Tensor) -> torch.Tensor:
        (loss / self._accumulation * self.optimizer.loss_scaler.cur_scale).backward()
        return loss

    def step(self) -> None:
        if self.is_gradient_accumulation_boundary():
            self._take_step()
        self.micro_steps += 1

    def _take_step(self) -> None:
        scaler, parameters = self.optimizer.loss_scaler, [p for p in self.module.parameters() if p.grad is not None]
        for parameter in parameters:
            if self._reduce is not None:
                self._reduce(parameter.grad)
            parameter.grad /= scaler.cur_scale
        norm = torch.stack([p.grad.double().norm() for p in parameters]).norm().item()
        self._global_grad_norm = norm
        self.optimizer.overflow = not math.isfinite(norm)
        if self.optimizer.overflow and self._checks:
            self._overflowed(scaler)
        else:
            self.optimizer.torch.step()
        self.module.zero_grad()
        self.global_steps += 1

    def _overflowed(self, scaler: SimpleNamespace) -> None:
        if scaler.dynamic and scaler.cur_scale <= scaler.min_scale:
            raise Exception("Current loss scale already at minimum")
        self.skipped_steps += 1
        if scaler.dynamic:
            scaler.cur_scale /= 2
