"""Where the numbers stand in lines that differ in nothing but digits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_MARKS = b"\n'\":,=| []()/<>{}"
"""Bytes between which numbers stand, the ones before that are used rather."""
_COST = 8
"""Bytes whose look costs as much as a place that is kept, about."""
_ZERO, _NINE = b"09"


@dataclass(frozen=True)
class Place:
    """A place in a line: `offset` bytes from the `which`-th of the bytes that are the same. The line's end is one."""

    byte: int
    which: int
    offset: int


@dataclass(frozen=True)
class Field:
    """Where in a line of one kind a number begins (`left`) and ends (`right`), as far as that is needed.

    `exponent` is true if the number is written with one, as 5e-05; then both are there. One is enough for an integer,
    of others the left one is there.
    """

    left: Place | None
    right: Place | None
    exponent: bool


@dataclass(frozen=True)
class _Options:
    """The marks by which the two ends of a number can be found, with the places where they stand."""

    start: int
    end: int
    lefts: dict[int, int]
    rights: dict[int, int]
    integer: bool
    exponent: bool

    def enough(self, marks: set[int]) -> bool:
        """True if the number can be found by these marks."""
        left, right = bool(marks & self.lefts.keys()), bool(marks & self.rights.keys())
        if self.exponent:
            return left and right
        return left or (self.integer and right)


def locate(line: bytes, spans: Sequence[tuple[int, int]], integers: Sequence[bool]) -> list[Field | None]:
    """Where the numbers at these places stand in all lines that differ from this one in nothing but digits.

    `integers` says of which only that is asked for; None stands for those that cannot be found.

    As few kinds of marks are used as it takes, none of them frequent: each kind costs a look at every byte of a log,
    each mark a place to be kept.
    """
    line += b"\n"
    options = [_around(line, *span, integer) for span, integer in zip(spans, integers, strict=True)]
    marks = set(_MARKS)
    possible = [option for option in options if option.enough(marks)]
    alone = {mark: sum(option.enough({mark}) for option in possible) for mark in _MARKS}
    for mark in sorted(
        _MARKS, key=lambda mark: (line.count(mark) * _COST < len(line), alone[mark], -_MARKS.index(mark))
    ):
        fewer = marks - {mark}
        if all(option.enough(fewer) for option in possible):
            marks = fewer
    return [_field(line, option, marks) if option.enough(marks) else None for option in options]


def _around(line: bytes, start: int, end: int, integer: bool) -> _Options:
    """The marks on both sides from which on there are no digits, with their places."""
    lefts = {mark: at for mark in _MARKS if (at := line.rfind(mark, 0, start)) >= 0 and _constant(line[at:start])}
    rights = {mark: at for mark in _MARKS if (at := line.find(mark, end)) >= 0 and _constant(line[end:at])}
    if line[end : end + 1] == b".":
        lefts = {}
    integer = integer and line[start:end].isdigit() and line[start - 1 : start] != b"."
    return _Options(start, end, lefts, rights, integer, any(byte in b"eE" for byte in line[start:end]))


def _field(line: bytes, option: _Options, marks: set[int]) -> Field:
    lefts = [at for mark, at in option.lefts.items() if mark in marks]
    rights = [at for mark, at in option.rights.items() if mark in marks]
    left = _place(line, max(lefts), option.start) if lefts else None
    right = _place(line, min(rights), option.end) if rights else None
    return Field(left, right if left is None or option.exponent else None, option.exponent)


def _constant(text: bytes) -> bool:
    return not any(_ZERO <= byte <= _NINE for byte in text)


def _place(line: bytes, mark: int, at: int) -> Place:
    return Place(line[mark], line.count(line[mark], 0, mark), at - mark)
