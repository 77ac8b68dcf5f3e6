"""The values in many lines of one kind, as arrays: where they stand, which are extreme, which are not finite."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from dsdoctor.logs.block import Array, Block
from dsdoctor.logs.fields import Field, Mark

_WIDTH = 8
_TAIL = 4
_FEED, _POINT, _ZERO, _NINE, _E = b"\n.09e"


class Lines:
    """Those parts of a block that are of one kind. Raises ValueError where one of them is of another."""

    def __init__(self, block: Block, places: Array) -> None:
        self._block = block
        self._starts = block.starts[places]
        self._ends = block.ends[places]
        self._firsts: dict[int, Array] = {}

    def column(self, field: Field) -> Column:
        """The numbers of one field."""
        return Column(self._block.padded, *self._bounds(field), exponent=field.exponent)

    def texts(self, field: Field) -> Array:
        """What stands in a field of each line, as integers: its first eight bytes, zeros behind its end."""
        return _heads(self._block.padded, *self._bounds(field))

    def _bounds(self, field: Field) -> tuple[Array, Array]:
        starts, ends = self._places(field.left) + field.start, self._places(field.right) - field.end
        if (ends <= starts).any():
            raise ValueError("a line without a number")
        return starts, ends

    def _places(self, mark: Mark) -> Array:
        """Where in each line this one of its bytes stands."""
        if mark.byte == _FEED:
            return self._ends
        marks = self._block.marks(mark.byte)
        if mark.byte not in self._firsts:
            self._firsts[mark.byte] = self._first(marks, mark.count)
        places: Array = marks[self._firsts[mark.byte] + mark.which]
        return places

    def _first(self, marks: Array, count: int) -> Array:
        """The number of the first of these marks in each line, each of which has to have `count` of them."""
        first: Array = np.searchsorted(marks, self._starts)
        last = first + (count - 1)
        beyond = np.append(marks, self._ends[-1])
        if last[-1] >= len(marks) or (marks[last] >= self._ends).any() or (beyond[last + 1] < self._ends).any():
            raise ValueError("a line with more or fewer marks")
        return first


def changes(texts: Array) -> list[int]:
    """Which texts are not those before them, and the ones before; the first and the last too."""
    turns = np.flatnonzero(texts[1:] != texts[:-1])
    return [0, *turns.tolist(), *(turns + 1).tolist(), len(texts) - 1]


def as_bytes(text: int) -> bytes:
    """A text out of `Lines.texts`, at most eight bytes of it."""
    return text.to_bytes(_WIDTH, "big").rstrip(b"\0")


class Column:
    """The numbers of one field. Only those that matter are made numbers."""

    def __init__(self, joined: bytes, starts: Array, ends: Array, *, exponent: bool) -> None:
        self._joined = joined
        self._starts = starts
        self._ends = ends
        # The order of the texts is that of the numbers where there is one digit before the point, and if there is an
        # exponent, the same one.
        plain = np.ones(len(ends), bool)
        if exponent:
            ends = ends - _TAIL
            tails = _integers(joined, ends, _TAIL)
            plain &= (tails == tails[0]) & ((tails[0] >> 24 | 0x20) == _E)
        heads = _heads(joined, starts, ends)
        first = heads >> 56
        plain &= (first >= _ZERO) & (first <= _NINE) & (heads >> 48 & 0xFF == _POINT)
        self._plain = np.flatnonzero(plain)
        self._order = heads[self._plain]
        self._odd = [(at, float(self._text(at))) for at in np.flatnonzero(~plain).tolist()]

    def _text(self, at: int) -> bytes:
        return self._joined[self._starts[at] : self._ends[at]]

    def beyond(self, widens: Callable[[float], bool]) -> list[int]:
        """Places of the least and of the greatest finite number, as far as they widen what is known."""
        finite = [(value, at) for at, value in self._odd if math.isfinite(value)]
        found = {min(finite)[1], max(finite)[1]} if finite else set()
        if len(self._plain):
            for choose, least in ((min, self._order.min()), (max, self._order.max())):
                same = self._plain[self._order == least].tolist()
                found.add(choose(same, key=lambda at: float(self._text(at))) if len(same) > 1 else same[0])
        return [at for at in found if widens(float(self._text(at)))]

    def non_finite(self) -> list[int]:
        """Places of numbers that are not finite."""
        return [at for at, value in self._odd if not math.isfinite(value)]


def _heads(joined: bytes, starts: Array, ends: Array) -> Array:
    """The first eight bytes of each text as one integer, zeros behind its end."""
    empty = np.maximum(starts - ends + _WIDTH, 0).astype(np.uint64) * 8
    heads: Array = _integers(joined, starts, _WIDTH) >> empty << empty
    return heads


def _integers(joined: bytes, starts: Array, width: int) -> Array:
    """The `width` bytes from each of these places on, each as one integer."""
    everywhere: Array = np.ndarray(len(joined) - width + 1, f">u{width}", joined, strides=(1,))
    found: Array = everywhere[starts].astype(np.uint64)
    return found
