"""Runs a micro-batch that is finite now, and was not, several times and in several ways. Rank processes only."""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from dsdoctor.numerics.bench import Bench, Result
from dsdoctor.numerics.repeats import Repeats

_RUNS = 4
_PAIR = 2
_UNORDERED = re.compile(r"^(?P<name>\S+) does not have a deterministic implementation")


def repeats(bench: Bench, first: Result, where: Callable[[], str], until: float) -> Repeats:
    """Repeat what `first` did; nothing is begun after `until` (monotonic). `where` names a bad value's place."""
    results = [first, *_runs(bench, _RUNS - 2, until)]
    with _deterministic() as unordered:
        filled = _runs(bench, _PAIR, until)
        unwritten = all(result.outcome == "not-finite" for result in filled) if filled else None
        place = where() if unwritten else ""
    results += _runs(bench, 1, until)  # last, so that a value that comes and goes is not taken for what filling does
    same = len({result.digest for result in results}) == 1
    return Repeats(
        runs=len(results),
        bad=sum(result.outcome != "finite" for result in results),
        same_bits=same,
        reads_unwritten=unwritten,
        where=place,
        fixed_order=None if same else _same_bits(filled),
        unordered=tuple(unordered),
        one_thread=None if same else _on_one_thread(bench, until),
    )


def _runs(bench: Bench, count: int, until: float) -> list[Result]:
    return [bench.run(bits=True) for _ in range(count) if time.monotonic() < until]


def _same_bits(results: list[Result]) -> bool | None:
    return len({result.digest for result in results}) == 1 if len(results) >= _PAIR else None


def _on_one_thread(bench: Bench, until: float) -> bool | None:
    threads = torch.get_num_threads()
    if threads == 1 or not bench.on_cpu:
        return None
    torch.set_num_threads(1)
    try:
        return _same_bits(_runs(bench, _PAIR, until))
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _deterministic() -> Iterator[list[str]]:
    """Deterministic algorithms where there are some, and new memory filled with NaN. Yields what has none."""
    on, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    names: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
        try:
            yield names
        finally:
            torch.use_deterministic_algorithms(on, warn_only=warns)
            torch.utils.deterministic.fill_uninitialized_memory = fills  # type: ignore[attr-defined]
            found = (_UNORDERED.match(str(warning.message)) for warning in caught)
            names += dict.fromkeys(match["name"] for match in found if match)
