"""The values in many lines of one kind, as arrays: where they stand, which are extreme, which are not finite.

Eight bytes of a text are taken as one integer, the first byte on top, and its bytes are looked at all together.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from dsdoctor.logs.block import Array, Block
from dsdoctor.logs.fields import Field, Place
from dsdoctor.logs.rows import NUMBER

_WIDTH = 8
_FEED = 0x0A
_EACH = 0x0101010101010101
_LOW, _HIGH = 0x7F * _EACH, 0x80 * _EACH
_EVERY_SECOND, _PAIRS, _HALF = 0x00FF00FF00FF00FF, 0x0000FFFF0000FFFF, 0xFFFFFFFF
_NUMBER = re.compile(NUMBER.encode())


class Lines:
    """Those parts of a block that are of one kind, that is, differ in nothing but digits."""

    def __init__(self, block: Block, places: Array) -> None:
        self._block = block
        self._starts = block.starts[places]
        self._ends = block.ends[places]
        self._firsts: dict[int, Array] = {}

    def column(self, field: Field) -> Column:
        """The numbers of one field, which has a place on its left."""
        tails = self._block.words(self._at(field.right)) & _HALF if field.exponent else None
        return Column(self._block, self._at(field.left), tails)

    def texts(self, field: Field) -> Array:
        """The first eight characters of the numbers in a field that has a place on its left."""
        return _of_number(self._block.words(self._at(field.left) + _WIDTH))

    def integers(self, field: Field) -> Array:
        """The integers in a field, as far as they have eight digits. Raises ValueError where one has none."""
        if field.left is not None:
            words = self._block.words(self._at(field.left) + _WIDTH)
            others = _flags_from_first(_not_digits(words))
            beyond = _count(others)
            words = (words & ~_whole(others)) >> np.minimum(8 * beyond, 63)
            missing = beyond == _WIDTH
        else:
            words = self._block.words(self._at(field.right))
            others = _not_digits(words)
            last = others & -others
            words = words & ((last >> 7) - 1)
            missing = last == 0x80
        if missing.any():
            raise ValueError("a line without a number")
        return _value(words & (0x0F * _EACH))

    def _at(self, place: Place | None) -> Array:
        """The place in each line. It lies as many bytes further in what `Block.words` takes as a word has."""
        assert place is not None
        if place.byte == _FEED:
            return self._ends + place.offset
        marks = self._block.marks(place.byte)
        if place.byte not in self._firsts:
            self._firsts[place.byte] = np.searchsorted(marks, self._starts)
        at: Array = marks[self._firsts[place.byte] + place.which] + place.offset
        return at


def changes(texts: Array) -> list[int]:
    """Which texts are not those before them, and the ones before; the first and the last too."""
    turns = np.flatnonzero(texts[1:] != texts[:-1])
    return [0, *turns.tolist(), *(turns + 1).tolist(), len(texts) - 1]


class Column:
    """The numbers of one field, without making numbers of them. `tails` are their last four bytes if they end in e-05.

    The order of the texts, the points below each other, is that of the numbers; if they have exponents, as long as
    these are the same.
    """

    def __init__(self, block: Block, starts: Array, tails: Array | None) -> None:
        self._block = block
        self._starts = starts
        words = block.words(starts + _WIDTH)
        self._behind = _count(_flags_from_first(_not_digits(words)))
        plain = (self._behind > 0) & (self._behind < _WIDTH)
        if tails is not None:
            first = int(tails[0])
            plain &= (tails == first) & (first >> 24 in b"eE")
        self._plain = np.flatnonzero(plain)
        self._words = _of_number(words)
        self._odd = [(at, self._number(at)) for at in np.flatnonzero(~plain).tolist()]

    def _number(self, at: int) -> float:
        match = _NUMBER.match(self._block.data, self._starts[at])
        return math.nan if match is None else float(match.group())

    def beyond(self, widens: Callable[[float], bool]) -> list[int]:
        """Places of the least and of the greatest finite number, as far as they widen what is known."""
        finite = [(value, at) for at, value in self._odd if math.isfinite(value)]
        found = {min(finite)[1], max(finite, key=lambda pair: pair[0])[1]} if finite else set()
        if len(self._plain):
            behind = self._behind[self._plain]
            shifts = (behind - behind.min()) * 8
            aligned = self._words[self._plain] >> shifts
            found |= {self._first(aligned, shifts, choose) for choose in (np.min, np.max)}
        return [at for at in found if widens(self._number(at))]

    def _first(self, words: Array, shifts: Array, choose: Callable[[Array], Any]) -> int:
        """The first of the least, or of the greatest numbers; `words` are the beginnings of the numbers."""
        extreme = int(choose(words))
        chosen = words == extreme
        among = self._plain[chosen]
        position = _WIDTH - int(shifts[chosen][0]) // 8
        while len(among) > 1 and extreme & 0xFF:  # the number goes on
            words = _of_number(self._block.words(self._starts[among] + (position + _WIDTH)))
            extreme = int(choose(words))
            among = among[words == extreme]
            position += _WIDTH
        return int(among[0])

    def non_finite(self) -> list[int]:
        """Places of numbers that are not finite."""
        return [at for at, value in self._odd if not math.isfinite(value)]


def _not_digits(words: Array) -> Array:
    """The uppermost bit of each byte that is no digit."""
    digits = words ^ (0x30 * _EACH)
    flags: Array = (((digits & _LOW) + 0x76 * _EACH) | digits) & _HIGH
    return flags


def _of_number(words: Array) -> Array:
    """The digits and points with which each word begins, zeros behind."""
    points = words ^ (ord(".") * _EACH)
    no_points = (((points & _LOW) + _LOW) | points) & _HIGH
    begins: Array = words & ~_whole(_flags_from_first(_not_digits(words) & no_points))
    return begins


def _flags_from_first(flags: Array) -> Array:
    """Flags of all bytes from the first one on that has a flag."""
    flags = flags | flags >> 8
    flags |= flags >> 16
    flags |= flags >> 32
    return flags


def _whole(flags: Array) -> Array:
    """All bits of the bytes that have a flag."""
    whole: Array = (flags >> 7) * 0xFF
    return whole


def _count(flags: Array) -> Array:
    """How many bytes have a flag."""
    count: Array = ((flags >> 7) * _EACH) >> 56
    return count


def _value(digits: Array) -> Array:
    """The integers that are written with these digits, one a byte."""
    digits = (digits >> 8 & _EVERY_SECOND) * 10 + (digits & _EVERY_SECOND)
    digits = (digits >> 16 & _PAIRS) * 100 + (digits & _PAIRS)
    values: Array = ((digits >> 32) * 10_000 + (digits & _HALF)).astype(np.int64)
    return values
