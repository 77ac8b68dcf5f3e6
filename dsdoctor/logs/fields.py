"""Where the numbers stand in lines that differ in nothing but digits."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

_MARKS = b"'\":,=| []()/<>{}\n"
"""Bytes between which numbers stand."""
_ZERO, _NINE = b"09"


@dataclass(frozen=True)
class Mark:
    """One of the bytes of a line: the `which`-th of the `count` that are the same as it."""

    byte: int
    count: int
    which: int


@dataclass(frozen=True)
class Field:
    """Where in a line of one kind a number stands: from `start` bytes after a mark to `end` bytes before another.

    The line's end is a mark too. `exponent` is true if the number is written with one, as 5e-05.
    """

    left: Mark
    start: int
    right: Mark
    end: int
    exponent: bool


def locate(line: bytes, start: int, end: int) -> Field | None:
    """Where the number at this place stands in all lines that differ from this one in nothing but digits."""
    line += b"\n"
    lefts = {mark: at for mark in _MARKS if (at := line.rfind(mark, 0, start)) >= 0 and _constant(line[at:start])}
    rights = {mark: at for mark in _MARKS if (at := line.find(mark, end)) >= 0 and _constant(line[end:at])}
    if not lefts or not rights:
        return None
    left, right = min(product(lefts, rights), key=lambda pair: sum(_cost(line, mark) for mark in set(pair)))
    exponent = any(byte in b"eE" for byte in line[start:end])
    before, after = lefts[left], rights[right]
    return Field(_mark(line, before), start - before, _mark(line, after), after - end, exponent)


def _cost(line: bytes, mark: int) -> int:
    """What it costs to find all of these bytes, about: every byte is looked at, and every place kept."""
    return len(line) + 8 * line.count(mark)


def _constant(text: bytes) -> bool:
    return not any(_ZERO <= byte <= _NINE for byte in text)


def _mark(line: bytes, at: int) -> Mark:
    byte = line[at]
    return Mark(byte, line.count(byte), line.count(byte, 0, at))
