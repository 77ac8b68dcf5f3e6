"""Where the numbers stand in lines that differ in nothing but digits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_MARKS = b"'\":,=| []()/<>{}\n"
"""Bytes between which numbers stand."""
_COST = 8
"""Bytes whose look costs as much as a place that is kept, about."""
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


def locate(line: bytes, spans: Sequence[tuple[int, int]]) -> list[Field | None]:
    """Where the numbers at these places stand in all lines that differ from this one in nothing but digits.

    As few kinds of marks are used as it takes, none of them frequent: each kind costs a look at every byte of a log,
    each mark a place to be kept.
    """
    line += b"\n"
    options = [_around(line, start, end) for start, end in spans]
    possible = [(lefts, rights) for lefts, rights in options if lefts and rights]
    alone = {mark: sum(mark in lefts and mark in rights for lefts, rights in possible) for mark in _MARKS}
    marks = set(_MARKS)
    for mark in sorted(_MARKS, key=lambda mark: (line.count(mark) * _COST < len(line), alone[mark], -line.count(mark))):
        fewer = marks - {mark}
        if all(fewer & lefts.keys() and fewer & rights.keys() for lefts, rights in possible):
            marks = fewer
    return [_field(line, span, *option, marks) for span, option in zip(spans, options, strict=True)]


def _around(line: bytes, start: int, end: int) -> tuple[dict[int, int], dict[int, int]]:
    """The marks on both sides from which on there are no digits, with their places."""
    lefts = {mark: at for mark in _MARKS if (at := line.rfind(mark, 0, start)) >= 0 and _constant(line[at:start])}
    rights = {mark: at for mark in _MARKS if (at := line.find(mark, end)) >= 0 and _constant(line[end:at])}
    return lefts, rights


def _field(
    line: bytes, span: tuple[int, int], lefts: dict[int, int], rights: dict[int, int], marks: set[int]
) -> Field | None:
    before, after = ([places[mark] for mark in marks & places.keys()] for places in (lefts, rights))
    if not before or not after:
        return None
    start, end = span
    left, right = max(before), min(after)
    exponent = any(byte in b"eE" for byte in line[start:end])
    return Field(_mark(line, left), start - left, _mark(line, right), right - end, exponent)


def _constant(text: bytes) -> bool:
    return not any(_ZERO <= byte <= _NINE for byte in text)


def _mark(line: bytes, at: int) -> Mark:
    byte = line[at]
    return Mark(byte, line.count(byte), line.count(byte, 0, at))
