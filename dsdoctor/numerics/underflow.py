"""Which share of the gradients fp16 flushes to zero, and which larger loss scale would keep them. Plain data, no torch.

It is measured on one micro-batch: an element counts as flushed that is 0 in the run's own precision and is not 0 with
the same weights, inputs and loss scale in fp32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Underflow:
    """`share` of the non-zero gradient elements that were flushed at loss scale `scale`, in that optimizer step.

    `worst` are the parameters with the largest shares. `larger` are shares with the loss scale multiplied, as (factor,
    share), for the factors whose gradients stayed finite.
    """

    step: int
    scale: float
    share: float
    worst: tuple[tuple[str, float], ...] = ()
    larger: tuple[tuple[float, float], ...] = ()

    @property
    def factor(self) -> float | None:
        """The smallest factor that at least halves the share, None where none does."""
        return next((factor for factor, share in self.larger if share <= self.share / 2), None)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Underflow:
        pairs = {name: tuple(tuple(pair) for pair in values[name]) for name in ("worst", "larger")}
        return cls(**{**values, **pairs})
