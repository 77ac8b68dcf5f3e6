"""The optimizer as a script sees it: masters, unscaling, clipping, skipped steps around a torch optimizer.

Runs in rank processes only (imports torch).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dsdoctor.runs.plain.errors import NotPlayed
from dsdoctor.runs.plain.gradients import any_rank, global_norm
from dsdoctor.runs.plain.precision import Pair, attach_masters
from dsdoctor.runs.plain.scaler import LossScale


class PlainOptimizer(Optimizer):
    """Stands where DeepSpeed's ZeRO optimizer stands: `engine.optimizer`.

    It is a torch Optimizer (schedulers insist) that shares groups and state with the one it wraps, `optimizer`.
    `overflow` tells whether the last step was skipped; `_global_grad_norm` is its norm, unscaled, before clipping.
    """

    def __init__(self, optimizer: Optimizer, loss_scale: LossScale, clipping: float, device: torch.device) -> None:
        # Optimizer.__init__ is left out: it would make groups and state of its own.
        self.optimizer = optimizer
        self.loss_scaler = loss_scale
        self.clip_grad = clipping
        self.pairs: list[Pair] = attach_masters(optimizer)
        self.overflow = False
        self._global_grad_norm: Tensor | None = None
        self._device = device

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.optimizer.defaults

    @property
    def cur_scale(self) -> float:
        return self.loss_scaler.scale

    @property
    def loss_scale(self) -> float:
        return self.loss_scaler.scale

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One optimizer step from the gradients of the model's parameters, or none if they overflowed.

        Raises:
            Exception: they overflowed with the dynamic loss scale at its minimum.
        """
        grads = [pair.parameter.grad for pair in self.pairs if pair.parameter.grad is not None]
        scale = self.loss_scaler.scale
        scaled_norm = global_norm(grads, self._device)
        bad = self.loss_scaler.checks and not bool(torch.isfinite(scaled_norm))
        self.overflow = any_rank(bad, self._device) if self.loss_scaler.checks else False
        self.loss_scaler.update(self.overflow)
        if self.overflow:
            self._global_grad_norm = torch.full((), float("inf"))
            return
        self._global_grad_norm = scaled_norm / scale
        self._hand_over(scale)
        self.optimizer.step()
        self.refresh_parameters()

    @torch.no_grad()
    def empty_step(self) -> None:
        """One step with zero gradients, by which DeepSpeed's 16-bit optimizers without ZeRO make their state.

        It counts for Adam's bias correction, so that the first steps are shorter than those of a fresh optimizer.
        """
        for pair in self.pairs:
            pair.master.grad = torch.zeros_like(pair.master)
        self.optimizer.step()
        for pair in self.pairs:
            pair.master.grad = None

    def _hand_over(self, scale: float) -> None:
        """Give the masters their gradients: in fp32, unscaled, clipped by the global norm."""
        divisor: float | Tensor = scale
        if self.clip_grad > 0 and self._global_grad_norm is not None:
            divisor = scale * ((self._global_grad_norm + 1e-6) / self.clip_grad).clamp(min=1.0)
        for pair in self.pairs:
            grad = pair.parameter.grad
            if pair.copied:
                pair.master.grad = grad = None if grad is None else grad.float()
            if grad is not None and (scale != 1 or self.clip_grad > 0):
                grad.mul_(1.0 / divisor)

    def refresh_parameters(self) -> None:
        """Copy the masters into the model."""
        for pair in self.pairs:
            if pair.copied:
                pair.parameter.copy_(pair.master)
                pair.master.grad = None

    @torch.no_grad()
    def refresh_fp32_params(self) -> None:
        """Copy the model into the masters, after a script changed the model's weights itself."""
        for pair in self.pairs:
            if pair.copied:
                pair.master.copy_(pair.parameter)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of the model's parameters."""
        for pair in self.pairs:
            if set_to_none or pair.parameter.grad is None:
                pair.parameter.grad = None
            else:
                pair.parameter.grad.zero_()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise NotPlayed("DeepSpeed fixes the optimizer's parameter groups when it is initialised")

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on: the wrapped optimizer, the masters, the loss scale."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "masters": [pair.master.detach() if pair.copied else None for pair in self.pairs],
            "loss_scale": self.loss_scaler.state(),
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up what `state_dict` returned."""
        self.optimizer.load_state_dict(state_dict["optimizer"])
        for pair, master in zip(self.pairs, state_dict["masters"], strict=True):
            if master is not None:
                pair.master.copy_(master)
        self.loss_scaler.restore(state_dict["loss_scale"])

    def __repr__(self) -> str:
        return f"PlainOptimizer({self.optimizer!r})"
