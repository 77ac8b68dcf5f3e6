"""Where two runs, or two batches of one run, part: in bits, beyond what rounding explains, and by a factor. No torch.

Tensors are matched by step, micro-step, phase, module and label, and gone through in the order of the first run. What
rounding explains is counted in eps of the coarsest type that either run has computed in so far, on the root mean square
of a tensor, in which the roundings of its elements mostly cancel. Measured on Llama and GPT-2 of four layers over
twelve steps of AdamW: runs in fp32, bf16 and fp16 with the same data stay within 4 eps of each other in activations,
weights and gradients, noise apart; another batch of random tokens is 15 eps of bf16 away and more.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dsdoctor.numerics.numbers import Number

EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
EPS |= {"float8_e4m3fn": 2.0**-3, "float8_e5m2": 2.0**-2}
COMPUTED = 8.0
"""Eps by which the root mean square of what was computed may differ in the first step. Every step rounds the weights
anew, so this grows as a random walk does, with the root of the number of steps."""
CAST = 1.0
"""The same for what was only cast: inputs, and the weights before the first step."""
FACTOR = 2.0
"""Ratio of the largest magnitudes, or of the root mean squares, that is a difference at a glance."""
_BEFORE, _EARLIER = 3, 5
"""Tensors before a place, and earlier sights of it, that are kept with it."""

Key = tuple[int, int, str, str, str, int]


@dataclass(frozen=True, kw_only=True)
class Pair:
    """The same tensor in both runs. `eps` is that of the coarsest type so far, 0 where nothing is rounded.

    `floor` is the root mean square up to which a weight or its gradient is noise: eps times the largest one so far. A
    bias that cannot change the loss has a gradient of nothing but rounding, and AdamW makes whole updates of that.
    """

    rank: int
    a: Number
    b: Number
    eps: float
    floor: float

    @property
    def same_bits(self) -> bool:
        a, b = self.a, self.b
        return (a.digest, a.dtype, a.count) == (b.digest, b.dtype, b.count)

    @property
    def difference(self) -> float | None:
        """Of the root mean squares, relative to the larger; None where one has none (integers, non-finite values)."""
        one, other = rms(self.a), rms(self.b)
        if one is None or other is None:
            return None
        larger = max(one, other)
        return abs(one - other) / larger if larger else 0.0

    @property
    def ratio(self) -> float | None:
        """Of the largest magnitudes, B's over A's; None where that says nothing."""
        if self.a.high == 0 or not math.isfinite(self.a.high) or not math.isfinite(self.b.high):
            return None
        return self.b.high / self.a.high

    @property
    def beyond_rounding(self) -> bool:
        if self.same_bits:
            return False
        if self._incomparable:
            return True
        if self.a.dtype not in EPS and self.b.dtype not in EPS:
            return True
        if self.difference is None or self._noise:
            return False
        return self.difference > self.eps * self.allowed

    @property
    def allowed(self) -> float:
        """Eps by which rounding may take the root mean squares apart."""
        return CAST if self._only_cast else COMPUTED * math.sqrt(1 + self.a.step)

    @property
    def beyond_factor(self) -> bool:
        if self.same_bits or self._noise:
            return False
        sizes = ((rms(self.a) or 0.0, rms(self.b) or 0.0), (self.a.high, self.b.high))
        return self._incomparable or any(max(pair) > FACTOR * min(pair) for pair in sizes)

    @property
    def _incomparable(self) -> bool:
        """Another shape, or not finite on one side only."""
        return self.a.count != self.b.count or math.isfinite(self.a.high) != math.isfinite(self.b.high)

    @property
    def _only_cast(self) -> bool:
        return self.a.phase == "input" or (self.a.phase == "parameter" and self.a.step == 0)

    @property
    def _noise(self) -> bool:
        sizes = rms(self.a), rms(self.b)
        return not self._only_cast and all(size is not None and size <= self.floor for size in sizes)


@dataclass(frozen=True, kw_only=True)
class Parting:
    """The first pair that differs by some measure, the pairs just before it, and earlier sights of the same tensor."""

    pair: Pair
    before: tuple[Pair, ...]
    earlier: tuple[Pair, ...]

    @property
    def drifted(self) -> bool:
        """Whether the same tensor was on its way there: half as far apart or more when it was last seen."""
        last = self.earlier[-1].difference if self.earlier else None
        now = self.pair.difference
        return now is not None and now > 0 and last is not None and last >= now / 2


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """`bits`, `rounding` and `factor` are the first places that differ by that measure, None where nothing does.

    `compared` counts pairs; `only_a` and `only_b` the tensors without a partner in steps that both runs have, with the
    first of each in words; `steps` are the optimizer steps that both have.
    """

    compared: int
    steps: int
    ranks: tuple[int, ...]
    bits: Parting | None = None
    rounding: Parting | None = None
    factor: Parting | None = None
    only_a: tuple[int, str] = (0, "")
    only_b: tuple[int, str] = (0, "")


def rms(number: Number) -> float | None:
    """The root mean square of a tensor's elements."""
    return number.norm / math.sqrt(number.count) if number.norm is not None else None


def compare(a: dict[int, Sequence[Number]], b: dict[int, Sequence[Number]]) -> Comparison:
    """Two runs, each by rank; only ranks that both have are compared."""
    ranks = tuple(sorted(set(a) & set(b)))
    found = [_one_rank(rank, a[rank], b[rank]) for rank in ranks]
    first: dict[str, Parting | None] = {
        name: min((one.partings[name] for one in found if name in one.partings), key=_when, default=None)
        for name in ("bits", "rounding", "factor")
    }
    return Comparison(
        compared=sum(one.compared for one in found),
        steps=max((one.steps for one in found), default=0),
        ranks=ranks,
        only_a=_unmatched(one.only_a for one in found),
        only_b=_unmatched(one.only_b for one in found),
        **first,
    )


def batch(numbers: Iterable[Number], number: int) -> tuple[Number, ...]:
    """One batch alone, as if it were the first of a run, to compare it with another one.

    The weights are left out: they move from step to step, and are the same in one.
    """
    return tuple(
        replace(one, step=0, micro_step=0) for one in numbers if one.batch == number and one.phase != "parameter"
    )


@dataclass
class _OneRank:
    compared: int = 0
    steps: int = 0
    partings: dict[str, Parting] = field(default_factory=dict)
    only_a: list[Number] = field(default_factory=list)
    only_b: list[Number] = field(default_factory=list)


def _one_rank(rank: int, a: Sequence[Number], b: Sequence[Number]) -> _OneRank:
    found = _OneRank(steps=1 + min((max((n.step for n in side), default=-1) for side in (a, b)), default=-1))
    others = {key: (order, number) for order, (key, number) in enumerate(_keyed(b)) if number.step < found.steps}
    before: deque[Pair] = deque(maxlen=_BEFORE)
    earlier: dict[tuple[Any, ...], deque[Pair]] = {}
    scale = _Scale()
    alone: list[Number] = []
    last = -1
    for key, number in _keyed(a):
        order, other = others.pop(key, (-1, None))
        if number.step >= found.steps:
            break
        if other is None:
            alone.append(number)
            continue
        last = max(last, order)
        found.only_a += alone  # what follows the last pair may only not have come to be before the run ended
        alone.clear()
        pair = scale.pair(rank, number, other)
        seen = earlier.setdefault(key[2:], deque(maxlen=_EARLIER))
        found.compared += 1
        for name, parts in (
            ("bits", not pair.same_bits),
            ("rounding", pair.beyond_rounding),
            ("factor", pair.beyond_factor),
        ):
            if parts and name not in found.partings:
                found.partings[name] = Parting(pair=pair, before=tuple(before), earlier=tuple(seen))
        before.append(pair)
        seen.append(pair)
    found.only_b = [number for order, number in others.values() if order < last]
    return found


class _Scale:
    """What counts as rounding, and in weights and their gradients as noise, by what was seen of both runs so far."""

    def __init__(self) -> None:
        self._eps = 0.0
        self._peaks: dict[str, float] = {}

    def pair(self, rank: int, a: Number, b: Number) -> Pair:
        self._eps = max(self._eps, *(EPS.get(number.dtype, 0.0) for number in (a, b)))
        if a.phase not in ("parameter", "backward") or a.tensor.startswith(("input", "output")):
            return Pair(rank=rank, a=a, b=b, eps=self._eps, floor=0.0)
        peak = max(self._peaks.get(a.phase, 0.0), rms(a) or 0.0, rms(b) or 0.0)
        self._peaks[a.phase] = peak
        return Pair(rank=rank, a=a, b=b, eps=self._eps, floor=self._eps * peak)


def _keyed(numbers: Iterable[Number]) -> Iterator[tuple[Key, Number]]:
    """Each number with what tells it from the others; the last part counts calls of the same module in a micro-step."""
    calls: Counter[tuple[Any, ...]] = Counter()
    for one in numbers:
        place = (one.step, one.micro_step, one.phase, one.module, one.tensor)
        calls[place] += 1
        yield (*place, calls[place]), one


def _when(parting: Parting) -> tuple[int, int, int, int]:
    """Its place in time. The order of the phases is that of a micro-step."""
    number = parting.pair.a
    order = ("input", "parameter", "forward", "backward").index(number.phase)
    return number.step, number.micro_step, order, parting.pair.rank


def _unmatched(ranks: Iterable[list[Number]]) -> tuple[int, str]:
    lists = list(ranks)
    first = next((numbers[0] for numbers in lists if numbers), None)
    return sum(map(len, lists)), place(first) if first is not None else ""


def place(number: Number) -> str:
    """Where a tensor is, in words."""
    what = {"input": "input", "parameter": "weight", "forward": "forward", "backward": "backward"}[number.phase]
    return f"{what} of {number.module or 'the model'}: {number.tensor}"
