"""Notices training that changes nothing: steps skipped in silence, or too small for the weights' type.

DeepSpeed skips a step with non-finite gradients, under bf16 without a word. A sample of the weights, compared on its
device after every step, tells whatever the engine says. Runs in rank processes only.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from dsdoctor.numerics.engines import local_weights

WINDOW = 40
"""Steps after which the watchdog looks at its count."""
_FEW = 2
"""Steps of a window that may change something in what is still called training that changes nothing."""
_PARAMETERS, _ELEMENTS = 4, 512
"""Parameters that are sampled, and elements of each."""


class Watchdog:
    """Counts on the device how many of the last steps changed no sampled weight; reads that once a window."""

    def __init__(self, model: nn.Module, warn: Callable[[str], None]) -> None:
        self._model = model
        self._warn = warn
        self._picked: list[nn.Parameter] | None = None
        self._last: Tensor | None = None
        self._still: Tensor | None = None
        self._steps = self._skipped = 0

    def before_step(self) -> None:
        """Take the sample that the first step is compared with."""
        if self._picked is None:
            self._picked = _largest(self._model)
            self._last = self._sample()

    def after_step(self, *, skipped: bool, scale: float, rate: float | None) -> None:
        """Compare. `scale` is the loss scale of the step, `rate` the largest learning rate, if known."""
        now = self._sample()
        if now is None or self._last is None or now.shape != self._last.shape:
            self._last = now
            return
        still = torch.eq(now, self._last).all().to(torch.int32)
        self._still = still if self._still is None else self._still + still
        self._last = now
        self._steps += 1
        self._skipped += skipped
        if self._steps == WINDOW:
            self._look(now.numel(), scale, rate)

    def _look(self, elements: int, scale: float, rate: float | None) -> None:
        assert self._still is not None
        still, skipped = int(self._still), self._skipped
        self._still, self._steps, self._skipped = None, 0, 0
        if still < WINDOW - _FEW:
            return
        if skipped >= still - _FEW:
            why = f"the engine skipped {skipped} of them for gradients that are not finite (loss scale {scale:g})"
        elif rate == 0:
            why = "the learning rate is 0"
        else:
            why = "gradients that are zero, or updates too small for the weights' type"
        self._warn(f"{still} of the last {WINDOW} steps changed no weight ({elements} were compared): {why}")

    @torch.no_grad()
    def _sample(self) -> Tensor | None:
        parts = []
        for parameter in self._picked or ():
            held = local_weights(parameter)
            if held is not None and held.numel():
                flat = held.detach().reshape(-1)
                parts.append(flat[:: 1 + flat.numel() // _ELEMENTS])
        return torch.cat(parts) if parts else None


def _largest(model: nn.Module) -> list[nn.Parameter]:
    """The largest trainable parameters that are of one type and on one device."""
    trained = [p for p in model.parameters() if p.requires_grad and not p.is_meta and p.layout is torch.strided]
    trained.sort(key=lambda p: getattr(p, "ds_numel", p.numel()), reverse=True)
    return [p for p in trained if p.dtype is trained[0].dtype and p.device == trained[0].device][:_PARAMETERS]
