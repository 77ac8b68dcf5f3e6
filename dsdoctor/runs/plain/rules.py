"""Update rules that torch lacks: Adam without bias correction, LAMB, Lion. Runs in rank processes only.

Written from the papers (arXiv 1412.6980, 1904.00962, 2302.06675), with the defaults of DeepSpeed's optimizers of the
same name so that an optimizer section means the same in both runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class _PerTensor(Optimizer):
    """Calls `update(parameter, gradient, state, group)` for each parameter that has a gradient."""

    def update(self, parameter: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, parameter.grad, self.state[parameter], group)
        return loss


def _adam_direction(grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
    """Adam's step direction m / (sqrt(v) + eps), bias-corrected where the group asks for it."""
    if not state:
        state.update(step=0, exp_avg=torch.zeros_like(grad), exp_avg_sq=torch.zeros_like(grad))
    state["step"] += 1
    beta1, beta2 = group["betas"]
    state["exp_avg"].lerp_(grad, 1 - beta1)
    state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    first = second = 1.0
    if group["bias_correction"]:
        first, second = 1 - beta1 ** state["step"], 1 - beta2 ** state["step"]
    root: Tensor = (state["exp_avg_sq"] / second).sqrt()
    direction: Tensor = state["exp_avg"] / first / (root + group["eps"])
    return direction


class PlainAdam(_PerTensor):
    """Adam or AdamW (`decoupled`) whose bias correction can be switched off."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        bias_correction: bool = True,
        decoupled: bool = True,
    ) -> None:
        self.decoupled = decoupled
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults | {"bias_correction": bias_correction})

    def update(self, parameter: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if self.decoupled:
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
        else:
            grad = grad.add(parameter, alpha=group["weight_decay"])
        parameter.sub_(group["lr"] * _adam_direction(grad, state, group))


class Lamb(_PerTensor):
    """LAMB: Adam's direction, scaled per tensor by the trust ratio |weights| / |direction| within given bounds."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        bias_correction: bool = True,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        bounds = {"max_coeff": max_coeff, "min_coeff": min_coeff}
        super().__init__(params, defaults | bounds | {"bias_correction": bias_correction})

    def update(self, parameter: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        direction = _adam_direction(grad, state, group).add(parameter, alpha=group["weight_decay"])
        weights, change = float(parameter.norm()), float(direction.norm())
        trust = 1.0
        if weights and change:
            trust = min(max(weights / change, group["min_coeff"]), group["max_coeff"])
        parameter.sub_(group["lr"] * trust * direction)


class Lion(_PerTensor):
    """Lion: the sign of an interpolated momentum, with decoupled weight decay."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def update(self, parameter: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["exp_avg"] = torch.zeros_like(grad)
        beta1, beta2 = group["betas"]
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.sub_(group["lr"] * torch.lerp(state["exp_avg"], grad, 1 - beta1).sign())
        state["exp_avg"].lerp_(grad, 1 - beta2)
