"""DeepSpeed's learning-rate schedules as functions of the step, and torch's by name.

The classes bear DeepSpeed's names, because Accelerate recognises them by name. Each counts applied optimizer steps in
`last_batch_iteration`, -1 before the first. Runs in rank processes only (imports torch).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from dsdoctor.runs.plain import release


def _per_group(optimizer: Optimizer, value: Any) -> list[float]:
    groups = len(optimizer.param_groups)
    values = list(value) if isinstance(value, (list, tuple)) else [value] * groups
    if len(values) != groups:
        raise ValueError(f"the schedule gives {len(values)} values for {groups} parameter groups")
    return values


class _Schedule:
    """Steps through `rates(iteration)`, the learning rate of each group."""

    def __init__(self, optimizer: Optimizer, last_batch_iteration: int) -> None:
        self.optimizer = optimizer
        self.last_batch_iteration = last_batch_iteration
        self._last_lr: list[Any] = []
        if last_batch_iteration == -1:
            self._apply(self.start())

    def start(self) -> Sequence[float]:
        """The rates before the first applied step."""
        raise NotImplementedError

    def rates(self, iteration: int) -> Sequence[float]:
        """The rates after the applied step number `iteration`, from 0."""
        raise NotImplementedError

    def _apply(self, rates: Sequence[float]) -> None:
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        self._last_lr = [group["lr"] for group in self.optimizer.param_groups]

    def get_lr(self) -> Sequence[float]:
        return self.start() if self.last_batch_iteration < 0 else self.rates(self.last_batch_iteration)

    def get_last_lr(self) -> list[Any]:
        return self._last_lr

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Go on to the next applied step, or to the given one."""
        following = self.last_batch_iteration + 1
        self.last_batch_iteration = following if last_batch_iteration is None else last_batch_iteration
        self._apply(self.rates(self.last_batch_iteration))

    def state_dict(self) -> dict[str, Any]:
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.last_batch_iteration = state["last_batch_iteration"]


class _Warmup:
    """The rising part shared by the warm-up schedules: from 0 to 1 over `steps`, linear or logarithmic."""

    def __init__(self, steps: int, kind: str) -> None:
        self.steps = max(2, int(steps))
        self.linear = kind == "linear"

    def share(self, iteration: int) -> float:
        if self.linear:
            return iteration / self.steps
        return 1.0 / math.log(self.steps) * math.log(iteration + 1)


class WarmupLR(_Schedule):
    """From `warmup_min_lr` to `warmup_max_lr` over `warmup_num_steps`, then constant."""

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_min_lr: Any = 0.0,
        warmup_max_lr: Any = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        if warmup_max_lr is None:
            warmup_max_lr = release.warmup_max_lr() or [group["lr"] for group in optimizer.param_groups]
        self.min_lrs = _per_group(optimizer, warmup_min_lr)
        self.max_lrs = _per_group(optimizer, warmup_max_lr)
        self.warmup = _Warmup(warmup_num_steps, warmup_type)
        super().__init__(optimizer, last_batch_iteration)

    def start(self) -> Sequence[float]:
        return self.min_lrs

    def share(self, iteration: int) -> float:
        return self.warmup.share(iteration) if iteration < self.warmup.steps else 1.0

    def rates(self, iteration: int) -> Sequence[float]:
        share = self.share(iteration)
        return [low + (high - low) * share for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]


class WarmupDecayLR(WarmupLR):
    """Like WarmupLR, then linearly down to `warmup_min_lr` at `total_num_steps`."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_lr: Any = 0.0,
        warmup_max_lr: Any = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total = total_num_steps
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration)

    def share(self, iteration: int) -> float:
        if iteration < self.warmup.steps:
            return self.warmup.share(iteration)
        return max(0.0, (self.total - iteration) / max(1.0, self.total - self.warmup.steps))


class WarmupCosineLR(_Schedule):
    """The optimizer's own rates times a ratio: up over `warmup_num_steps`, then a half cosine to `cos_min_ratio`."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total = total_num_steps
        self.warmup_min_ratio = warmup_min_ratio
        self.cos_min_ratio = cos_min_ratio
        self.warmup = _Warmup(warmup_num_steps, warmup_type)
        self.base_lrs = [float(group["lr"]) for group in optimizer.param_groups]
        super().__init__(optimizer, last_batch_iteration)

    def start(self) -> Sequence[float]:
        return [0.0] * len(self.base_lrs)

    def rates(self, iteration: int) -> Sequence[float]:
        return [base * self._ratio(iteration) for base in self.base_lrs]

    def _ratio(self, iteration: int) -> float:
        if iteration < self.warmup.steps:
            return self.warmup_min_ratio + self.warmup.share(iteration) * (1 - self.warmup_min_ratio)
        done = (iteration - self.warmup.steps + 1) / max(1, self.total - self.warmup.steps)
        cosine = (1 + math.cos(math.pi * min(1.0, done))) / 2
        return max(0.0, self.cos_min_ratio + (1 - self.cos_min_ratio) * cosine)


class LRRangeTest(_Schedule):
    """Grows the rate without end, by `step_rate` of the first rate every `step_size` steps; in stairs if asked."""

    def __init__(
        self,
        optimizer: Optimizer,
        lr_range_test_min_lr: Any = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        self.min_lrs = _per_group(optimizer, lr_range_test_min_lr)
        self.step_size = lr_range_test_step_size
        self.step_rate = lr_range_test_step_rate
        self.staircase = lr_range_test_staircase
        super().__init__(optimizer, last_batch_iteration)

    def start(self) -> Sequence[float]:
        return self.min_lrs

    def rates(self, iteration: int) -> Sequence[float]:
        interval = (iteration + 1) / self.step_size
        growth = 1 + self.step_rate * (math.floor(interval) if self.staircase else interval)
        return [low * growth for low in self.min_lrs]


class OneCycle(_Schedule):
    """One triangle between two rates (and, against it, two momenta), then a decay."""

    def __init__(
        self,
        optimizer: Optimizer,
        cycle_min_lr: Any,
        cycle_max_lr: Any,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: float = 2000,
        cycle_second_step_size: float | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: float = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: Any = 0.8,
        cycle_max_mom: Any = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        self.min_lrs = _per_group(optimizer, cycle_min_lr)
        self.max_lrs = _per_group(optimizer, cycle_max_lr)
        self.first = float(cycle_first_step_size)
        self.second = self.first if cycle_second_step_size is None else float(cycle_second_step_size)
        self.stairs = cycle_first_stair_count, cycle_first_stair_count
        if cycle_second_stair_count is not None:
            self.stairs = cycle_first_stair_count, cycle_second_stair_count
        self.decay_step_size = decay_step_size
        self.decay_lr_rate = decay_lr_rate
        self.decay_mom_rate = decay_mom_rate
        self.cycle_momentum = cycle_momentum and "betas" in optimizer.defaults
        self.min_moms = _per_group(optimizer, cycle_min_mom)
        self.max_moms = _per_group(optimizer, cycle_max_mom)
        super().__init__(optimizer, last_batch_iteration)
        if self.cycle_momentum and last_batch_iteration == -1:
            self._apply_momentum(self.min_moms)

    def start(self) -> Sequence[float]:
        return self.min_lrs

    def get_lr(self) -> Sequence[float]:
        return self.rates(self.last_batch_iteration)

    def step(self, last_batch_iteration: int | None = None) -> None:
        super().step(last_batch_iteration)
        if self.cycle_momentum:
            self._apply_momentum(self.momenta(self.last_batch_iteration))

    def rates(self, iteration: int) -> Sequence[float]:
        if iteration < self.first + self.second:
            height = self._height(iteration + 1)
            return [low + (high - low) * height for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]
        return [low / self._decay(iteration, self.decay_lr_rate) for low in self.min_lrs]

    def momenta(self, iteration: int) -> Sequence[float]:
        """Adam's first beta for each group: high where the rate is low."""
        if iteration < self.first + self.second:
            height = self._height(iteration + 1)
            return [high - (high - low) * height for low, high in zip(self.min_moms, self.max_moms, strict=True)]
        return [high * self._decay(iteration, self.decay_mom_rate) for high in self.max_moms]

    def _decay(self, iteration: int, rate: float) -> float:
        if not self.decay_step_size:
            return 1.0
        return 1 + rate * (iteration - (self.first + self.second) + 1) / self.decay_step_size

    def _height(self, position: float) -> float:
        """How far up the triangle, 0 to 1, after `position` steps of the cycle."""
        position %= self.first + self.second
        rising = position <= self.first
        height = position / self.first if rising else (self.first + self.second - position) / self.second
        stairs = self.stairs[0] if rising else self.stairs[1]
        return math.floor(height * stairs) / stairs if stairs > 0 else height

    def _apply_momentum(self, momenta: Sequence[float]) -> None:
        for group, momentum in zip(self.optimizer.param_groups, momenta, strict=True):
            group["betas"] = (momentum, 0.99)


_OWN: dict[str, type[_Schedule]] = {
    schedule.__name__: schedule for schedule in (WarmupLR, WarmupDecayLR, WarmupCosineLR, LRRangeTest, OneCycle)
}


def from_config(name: str, optimizer: Optimizer, options: Mapping[str, Any], notes: list[str]) -> Any:
    """Build the schedule `name` (one of DeepSpeed's, or a class of torch). Parameters it does not know go to `notes`.

    Raises:
        AttributeError: neither has it.
    """
    chosen = _OWN.get(name) or getattr(torch.optim.lr_scheduler, name)
    known = set(inspect.signature(chosen).parameters)
    unknown = sorted(set(options) - known)
    if unknown:
        notes.append(f"scheduler.params {', '.join(unknown)} mean nothing to {name}: left out")
    return chosen(optimizer, **{key: value for key, value in options.items() if key in known})
