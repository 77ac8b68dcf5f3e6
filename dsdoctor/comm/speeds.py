"""What the figures of all ranks mean together: bus bandwidth, the slowest pair, the slowest rank. Plain data, pure.

The factors that turn bytes over seconds into bus bandwidth are those of NVIDIA's nccl-tests (PERFORMANCE.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dsdoctor.machine.interconnect import Way

_SLOW_PAIR = 3.0
_FAR_BELOW = 5.0
"""So many times less than its specification a link gives only when it is not the one that is used, or is broken."""
_SLOW_RANK = 1.5
_FEWEST = 3
"""Fewer figures of a kind than this have no middle to be compared with."""

_FACTORS: Mapping[str, Callable[[int], float]] = {
    "all_reduce": lambda ranks: 2 * (ranks - 1) / ranks,
    "all_gather": lambda ranks: (ranks - 1) / ranks,
    "reduce_scatter": lambda ranks: (ranks - 1) / ranks,
    "broadcast": lambda ranks: 1.0,
}


@dataclass(frozen=True, kw_only=True)
class Speed:
    """One collective at one size. `seconds` a round, of the slowest rank; `bus` in bytes a second."""

    collective: str
    bytes: int
    seconds: float
    bus: float


@dataclass(frozen=True, kw_only=True)
class PairSpeed:
    """Between two ranks, one direction at a time; `bandwidth` in bytes a second. `across` nodes or inside one."""

    low: int
    high: int
    bandwidth: float
    across: bool
    way: Way | None = None
    """The link between them and what it should give; None where nothing is known of it."""


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """`compute` is seconds of the same product of matrices at its best, by rank."""

    collectives: tuple[Speed, ...] = ()
    pairs: tuple[PairSpeed, ...] = ()
    compute: Mapping[int, float] = field(default_factory=dict)

    def slow_pairs(self) -> tuple[tuple[PairSpeed, float], ...]:
        """Pairs far slower than the middle of their kind, each with how many times; the slowest first."""
        found = []
        for across in (False, True):
            kind = [pair for pair in self.pairs if pair.across is across]
            if len(kind) < _FEWEST:
                continue
            middle = _median(pair.bandwidth for pair in kind)
            found += [(pair, middle / pair.bandwidth) for pair in kind if middle > _SLOW_PAIR * pair.bandwidth]
        return tuple(sorted(found, key=lambda one: -one[1]))

    def below_their_links(self) -> tuple[PairSpeed, ...]:
        """Pairs that get far less than their link should give, the slowest first."""
        found = [
            pair for pair in self.pairs if pair.way and pair.way.best and pair.way.best > _FAR_BELOW * pair.bandwidth
        ]
        return tuple(sorted(found, key=lambda pair: pair.bandwidth))

    def slow_ranks(self) -> tuple[tuple[int, float], ...]:
        """Ranks that compute more slowly than the middle of all, each with how many times; the slowest first."""
        if len(self.compute) < _FEWEST:
            return ()
        middle = _median(self.compute.values())
        found = [(rank, seconds / middle) for rank, seconds in self.compute.items() if seconds > _SLOW_RANK * middle]
        return tuple(sorted(found, key=lambda one: -one[1]))


def _median(values: Iterable[float]) -> float:
    from statistics import median  # every command imports this module, and few measure

    return median(values)


def speeds(
    records: Sequence[Iterable[Mapping[str, Any]]],
    hosts: Sequence[str],
    between: Callable[[int, int], Way | None] = lambda low, high: None,
) -> Speeds | None:
    """From the records of all ranks, the host of each and the way between two; None where nothing was measured."""
    measured = [
        (rank, record["what"], record["bytes"], record["seconds"])
        for rank, own in enumerate(records)
        for record in own
        if record["event"] == "measured" and record["seconds"] > 0
    ]
    if not measured:
        return None
    rounds: dict[tuple[str, int], float] = {}
    for _, what, size, seconds in measured:
        if what in _FACTORS:
            rounds[what, size] = max(seconds, rounds.get((what, size), 0.0))
    return Speeds(
        collectives=tuple(_speed(what, size, seconds, len(records)) for (what, size), seconds in rounds.items()),
        pairs=tuple(
            _pair(what, size / seconds, hosts, between)
            for _, what, size, seconds in measured
            if what.startswith("pair ")
        ),
        compute={rank: seconds for rank, what, _, seconds in measured if what == "compute"},
    )


def _speed(collective: str, size: int, seconds: float, ranks: int) -> Speed:
    bus = size / seconds * _FACTORS[collective](ranks)
    return Speed(collective=collective, bytes=size, seconds=seconds, bus=bus)


def _pair(what: str, bandwidth: float, hosts: Sequence[str], between: Callable[[int, int], Way | None]) -> PairSpeed:
    low, high = map(int, what.removeprefix("pair ").split("-"))
    way = between(low, high)
    return PairSpeed(low=low, high=high, bandwidth=bandwidth, across=hosts[low] != hosts[high], way=way)
