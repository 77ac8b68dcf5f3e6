"""Delta debugging: the smallest part of a list that still does what the whole list does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TypeVar

T = TypeVar("T")


def ddmin(items: Sequence[T], does: Callable[[Sequence[T]], bool]) -> list[T]:
    """A part of `items` that `does` accepts and from which no single item can be left out, in their order.

    `does` accepts the whole list, which is not asked again. The algorithm is Zeller and Hildebrandt's ("Simplifying and
    isolating failure-inducing input", 2002): halves, then finer parts and what is left without them.
    """
    found, parts = list(items), 2
    while len(found) >= 2:
        chunks = _split(found, parts)
        smaller = next((chunk for chunk in chunks if does(chunk)), None)
        if smaller is not None:
            found, parts = smaller, 2
            continue
        rests = ([item for item in found if item not in chunk] for chunk in chunks) if parts > 2 else ()
        rest = next((rest for rest in rests if does(rest)), None)
        if rest is not None:
            found, parts = rest, max(parts - 1, 2)
        elif parts < len(found):
            parts = min(len(found), 2 * parts)
        else:
            break
    return found


def _split(items: list[T], parts: int) -> list[list[T]]:
    """Consecutive parts of nearly equal size, none empty."""
    edges = [round(n * len(items) / parts) for n in range(parts + 1)]
    return [items[start:end] for start, end in pairwise(edges) if end > start]
