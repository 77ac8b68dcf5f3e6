"""The batch triangle: train_batch_size = micro batch per GPU x accumulation steps x data-parallel ranks.

The arithmetic follows DeepSpeed's `_set_batch_related_parameters` and `_batch_assertion` step by step, floor divisions
included, so that a config is refused here exactly where DeepSpeed refuses it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

TRAIN = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
STEPS = "gradient_accumulation_steps"
KEYS = (TRAIN, MICRO, STEPS)


@dataclass(frozen=True, kw_only=True)
class BatchTriple:
    """The three sizes, in samples and micro-steps."""

    train: int
    micro: int
    steps: int

    def patch(self) -> dict[str, int]:
        """The merge patch that writes all three."""
        return {TRAIN: self.train, MICRO: self.micro, STEPS: self.steps}


@dataclass(frozen=True, kw_only=True)
class Triangle:
    """What DeepSpeed makes of the three values. `problem` is None where it accepts them."""

    train: float | None
    micro: float | None
    steps: float | None
    problem: str | None = None


def is_too_small(value: Any) -> bool:
    """A number that is no size: 0 or below."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value <= 0


def complete(train: float | None, micro: float | None, steps: float | None, ranks: int) -> Triangle:
    """Fill in what is missing and check the product, as DeepSpeed does for `ranks` data-parallel ranks.

    The sizes are counts; DeepSpeed does not insist on whole numbers, so fractions go through its arithmetic too.

    A given zero makes DeepSpeed divide by it; that is reported as a problem too.
    """
    if train is None and micro is None:
        return Triangle(train=None, micro=None, steps=steps, problem=f"neither {TRAIN} nor {MICRO} is given")
    zero = [
        name for name, value in zip(KEYS, (train, micro, steps), strict=True) if value is not None and not value > 0
    ]
    if zero:
        return Triangle(train=train, micro=micro, steps=steps, problem=f"{zero[0]} has to be greater than 0")
    full_train, full_micro, full_steps = _fill(train, micro, steps, ranks)
    return Triangle(
        train=full_train,
        micro=full_micro,
        steps=full_steps,
        problem=_mismatch(full_train, full_micro, full_steps, ranks),
    )


def _fill(train: float | None, micro: float | None, steps: float | None, ranks: int) -> tuple[float, float, float]:
    if train is None:
        assert micro is not None
        return micro * (steps or 1) * ranks, micro, steps or 1
    if micro is not None:
        return train, micro, train // micro // ranks if steps is None else steps
    return train, train // ranks // (steps or 1), steps or 1


def _mismatch(train: float, micro: float, steps: float, ranks: int) -> str | None:
    if not micro > 0:
        return f"{TRAIN} {train} leaves less than one sample a micro-step for each of {ranks} ranks"
    if not steps > 0:
        return f"{TRAIN} {train} is smaller than {MICRO} {micro} x {ranks} ranks"
    if train != micro * steps * ranks:
        return f"{TRAIN} {train} is not {micro} x {steps} x {ranks} = {micro * steps * ranks}"
    return None


def nearest_triples(
    train: float | None, micro: float | None, steps: float | None, ranks: int
) -> tuple[BatchTriple, ...]:
    """Valid triples near the given values: those that change one key first, then those that keep the total batch.

    Empty where nothing positive is given to start from, and for fractions, which nobody means.
    """
    given = (train, micro, steps)
    if not all(size is None or isinstance(size, int) for size in given):
        return ()
    return _nearest(*(None if size is None else int(size) for size in given), ranks=ranks)


def _nearest(train: int | None, micro: int | None, steps: int | None, *, ranks: int) -> tuple[BatchTriple, ...]:
    options: list[BatchTriple | None] = []
    if micro and steps:
        options.append(BatchTriple(train=micro * steps * ranks, micro=micro, steps=steps))
    if train and micro and train % (micro * ranks) == 0:
        options.append(BatchTriple(train=train, micro=micro, steps=train // (micro * ranks)))
    if train and steps and train % (steps * ranks) == 0:
        options.append(BatchTriple(train=train, micro=train // (steps * ranks), steps=steps))
    if train and train > 0:
        options.extend(_near_total(train, micro, steps, ranks))
    valid = [option for option in options if option is not None and min(option.micro, option.steps) > 0]
    return tuple(dict.fromkeys(valid))


def _near_total(train: int, micro: int | None, steps: int | None, ranks: int) -> list[BatchTriple]:
    """The totals next to `train` that the ranks can share, each split as close to the given values as it goes."""
    below = train // ranks
    shares = {below} if train % ranks == 0 else {below, below + 1}
    return [_split(share, micro, steps, ranks) for share in sorted(shares) if share > 0]


def _split(share: int, micro: int | None, steps: int | None, ranks: int) -> BatchTriple:
    """Split one rank's share of the batch into micro-steps. A micro batch above the given one may not fit: avoided."""
    small = [size for size in range(1, math.isqrt(share) + 1) if share % size == 0]
    divisors = small + [share // size for size in small]
    if micro:
        best = max(size for size in divisors if size <= micro)
    elif steps:
        best = min(divisors, key=lambda size: abs(share // size - steps))
    else:
        best = share
    return BatchTriple(train=share * ranks, micro=best, steps=share // best)
