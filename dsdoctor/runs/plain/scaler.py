"""The loss scale: what the loss is multiplied by before backward, and how that changes with each optimizer step.

Runs in rank processes only (imports torch).
"""

from __future__ import annotations

from typing import Any

import torch

from dsdoctor.runs.plain import release
from dsdoctor.runs.plain.settings import LossScaleSettings, Settings


class LossScale:
    """A scale that never moves: 1 without scaling, or fp16's static `loss_scale`.

    `scale` multiplies the loss; `checks` tells whether non-finite gradients skip the step.
    """

    def __init__(self, scale: float = 1.0, *, checks: bool = False) -> None:
        self.scale = scale
        self.checks = checks

    def update(self, overflow: bool) -> None:
        """Take note of one attempted optimizer step that did or did not overflow."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: plain numbers."""
        return {key: value for key, value in vars(self).items() if isinstance(value, (bool, int, float))}

    def restore(self, state: dict[str, Any]) -> None:
        """Take up what `state` returned."""
        vars(self).update(state)

    def take_over(self, scaler: Any) -> None:
        """Go on where DeepSpeed's own scaler of a checkpoint stood; nothing to do for a scale that never moves."""


class DynamicScale(LossScale):
    """DeepSpeed's dynamic loss scale for fp16, step for step.

    An overflow first uses up hysteresis, then halves the scale down to the minimum; a run of clean steps doubles it and
    refills hysteresis. Hysteresis 0 never halves, as in DeepSpeed.
    """

    def __init__(self, settings: LossScaleSettings, growth_delay: int = 1) -> None:
        super().__init__(settings.initial, checks=True)
        self.settings = settings
        self._growth_delay = growth_delay
        self._step = 0
        self._last_overflow = -1
        self._hysteresis = settings.hysteresis

    def update(self, overflow: bool) -> None:
        """Move the scale after one attempted optimizer step.

        Raises:
            Exception: the step overflowed with the scale at its minimum, which ends the run as in DeepSpeed.
        """
        if overflow:
            self._shrink()
            self._last_overflow = self._step
        else:
            self._grow()
        self._step += 1

    def take_over(self, scaler: Any) -> None:
        """Go on where DeepSpeed's own scaler of a checkpoint stood, which overrules the config there too."""
        names = {"scale": "cur_scale", "_step": "cur_iter", "_last_overflow": "last_overflow_iter"}
        for mine, theirs in (names | {"_hysteresis": "cur_hysteresis"}).items():
            if hasattr(scaler, theirs):
                setattr(self, mine, getattr(scaler, theirs))

    def _shrink(self) -> None:
        settings = self.settings
        if settings.hysteresis != 1 and self._hysteresis != 1:
            self._hysteresis -= 1
        elif self.scale == settings.minimum:
            raise Exception(
                f"Current loss scale already at minimum ({self.scale:g}) and the gradients still overflow, "
                "so there is nothing left to reduce."
            )
        else:
            self.scale = max(self.scale / 2, settings.minimum)

    def _grow(self) -> None:
        settings = self.settings
        if settings.consecutive_hysteresis:
            self._hysteresis = settings.hysteresis
        clean = self._step - self._last_overflow - self._growth_delay
        if clean > 0 and clean % settings.window == 0:
            self._hysteresis = settings.hysteresis
            self.scale *= 2


class AutocastScale(LossScale):
    """The scale of fp16 autocast, by the rules of torch's GradScaler: 2**16, doubled every 2000 clean steps."""

    def __init__(self) -> None:
        super().__init__(2.0**16, checks=True)
        self._clean = 0

    def update(self, overflow: bool) -> None:
        """Halve at once on an overflow, double after 2000 steps without one."""
        self._clean = 0 if overflow else self._clean + 1
        if overflow:
            self.scale /= 2
        elif self._clean == 2000:
            self.scale *= 2
            self._clean = 0


def loss_scale(settings: Settings) -> LossScale:
    """The loss scale that the settings ask for."""
    if settings.precision == "fp16":
        if settings.loss_scale.static is not None:
            return LossScale(settings.loss_scale.static, checks=True)
        return DynamicScale(settings.loss_scale, release.growth_delay())
    if settings.autocast is torch.float16:
        return AutocastScale()
    return LossScale()
