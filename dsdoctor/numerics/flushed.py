"""Measures gradient underflow by running a micro-batch in the run's precision and in fp32. Rank processes only."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from dsdoctor.numerics.bench import Bench
from dsdoctor.numerics.underflow import Underflow

_FACTORS = (16.0, 256.0, 4096.0)
"""Larger loss scales that are tried."""
_WORTH = 0.01
"""Share below which nothing larger is tried."""
_WORST = 5


def measure(bench: Bench, *, step: int, scale: float) -> Underflow | None:
    """The flushed share of a batch whose backward was seen; None where it cannot be told.

    Backward starts from the gradients of the model's outputs as they were. Where the script computes the loss, what was
    flushed before it came to the outputs is not counted, so the share is at least this.

    Raises:
        NotReplayable: the batch cannot run again.
    """
    exact = _gradients(bench, dtype=torch.float32)
    kept = _gradients(bench, zeros=True)
    if exact is None or kept is None:
        return None
    share, by_name = _share(kept, exact)
    worst = sorted(by_name.items(), key=lambda item: -item[1])[:_WORST]
    larger = []
    for factor in _FACTORS if share >= _WORTH else ():
        scaled = _gradients(bench, factor=factor, zeros=True)
        if scaled is None:
            break
        larger.append((factor, _share(scaled, exact)[0]))
    return Underflow(step=step, scale=scale, share=share, worst=tuple(worst), larger=tuple(larger))


def _gradients(
    bench: Bench, *, dtype: torch.dtype | None = None, factor: float = 1.0, zeros: bool = False
) -> dict[str, Tensor] | None:
    """The gradients of one run; None where one is not finite, or (but for `zeros`) all are 0."""
    found: dict[str, Tensor] = {}
    result = bench.run(dtype=dtype, gradients=found, factor=factor)
    some = any(bool(gradient.any()) for gradient in found.values())
    return found if result.outcome == "finite" and found and (some or zeros) else None


def _share(kept: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> tuple[float, dict[str, float]]:
    """The share over all parameters, and that of each."""
    lost = {name: int(((kept[name] == 0) & (exact[name] != 0)).sum()) for name in kept if name in exact}
    there = {name: int((exact[name] != 0).sum()) for name in lost}
    by_name = {name: lost[name] / there[name] for name in lost if there[name]}
    return sum(lost.values()) / max(1, sum(there.values())), by_name
