"""Where the numbers stand in lines that differ in nothing but digits."""

from __future__ import annotations

from dataclasses import dataclass

_MARKS = b"'\":,=| "
_ZERO, _NINE = b"09"


@dataclass(frozen=True)
class Field:
    """Where in a line of one kind a number stands: between two of the line's `count` bytes `mark`.

    It starts `start` bytes after the `left`-th of them and ends `end` bytes before the `right`-th. `exponent` is true
    if it is written with one, as 5e-05.
    """

    mark: int
    count: int
    left: int
    start: int
    right: int
    end: int
    exponent: bool


def locate(line: bytes, start: int, end: int) -> Field | None:
    """Where the number at this place stands in all lines that differ from this one in nothing but digits."""
    for mark in _MARKS:
        left, right = line.rfind(mark, 0, start), line.find(mark, end)
        between = line[left + 1 : start] + line[end : max(right, end)]
        if left >= 0 and right >= 0 and not any(_ZERO <= byte <= _NINE for byte in between):
            before = line.count(mark, 0, left)
            inside = line.count(mark, start, end)
            exponent = any(byte in b"eE" for byte in line[start:end])
            return Field(mark, line.count(mark), before, start - left, before + 1 + inside, right - end, exponent)
    return None
