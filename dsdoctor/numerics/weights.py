"""Reads the weights once per optimizer step, not once per use. Runs in rank processes only."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

from torch import Tensor, nn

from dsdoctor.numerics.engines import is_gathered, local_weights
from dsdoctor.numerics.stats import Range, looks_like_mask, measure

_EXPLODED = 1e3
"""Times by which the largest weight of the model has to grow since the first step to be called exploded."""


class WeightWatch:
    """Ranges of parameters, kept until the next optimizer step or an in-place change.

    `bad_at_start` names those that were not finite when `start` read them.
    """

    def __init__(self) -> None:
        self._ranges: dict[int, tuple[weakref.ref[Tensor], int, Range | None]] = {}
        self._first: float | None = None
        self._largest = 0.0
        self.bad_at_start: list[tuple[str, str]] = []

    def range_of(self, parameter: Tensor) -> Range | None:
        """The range of a parameter or buffer that is there in full. None for one that is partitioned away."""
        if not is_gathered(parameter) or parameter.numel() == 0:
            return None
        known = self._ranges.get(id(parameter))
        if known is None or known[0]() is not parameter or known[1] != parameter._version:
            known = (weakref.ref(parameter), parameter._version, measure(parameter))
            self._ranges[id(parameter)] = known
            if isinstance(parameter, nn.Parameter):
                self._grew(known[2])
        return known[2]

    def start(self, model: nn.Module) -> None:
        """Read the weights as they are before training, where nothing reads them in forward."""
        self.bad_at_start = [(module, name) for module, name, _ in self.scan(model)]
        self._first = self._largest

    def scan(self, model: nn.Module) -> Iterator[tuple[str, str, Range]]:
        """Module, parameter and range of each bad weight after an optimizer step, as far as this rank holds it."""
        self._first = self._largest if self._first is None else self._first
        self._ranges.clear()
        self._largest = 0.0
        for name, parameter in model.named_parameters():
            held = local_weights(parameter)
            found = measure(held) if held is not None else None
            if held is parameter:
                self._ranges[id(parameter)] = (weakref.ref(parameter), parameter._version, found)
            self._grew(found)
            if found is not None and found.kind is not None and is_harmful(parameter):
                module, _, label = name.rpartition(".")
                yield module, label, found

    def growth(self) -> float | None:
        """How many times larger the largest weight is than in the first step, if that is an explosion, else None."""
        if not self._first or self._largest < _EXPLODED * self._first:
            return None
        return self._largest / self._first

    def _grew(self, found: Range | None) -> None:
        if found is not None and found.kind is None:
            self._largest = max(self._largest, found.high)


def is_harmful(parameter: Tensor) -> bool:
    """False for a mask that is kept as a frozen parameter."""
    return parameter.requires_grad or not looks_like_mask(parameter)
