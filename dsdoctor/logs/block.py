"""A block of a log, taken apart into lines, or into the segments between carriage returns where these stand for lines.

numpy is imported here at module level; a short log is read line by line and does not need this module.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dsdoctor.logs.shapes import keys

Array = np.ndarray[Any, np.dtype[Any]]
_FEED, _RETURN = b"\n\r"
_WORD = 8
_SAMPLE = 8192
_SEGMENTS_OF_A_LINE = 8


def _by_lines(data: bytes) -> bool:
    """True if it is better taken apart at line feeds only: its lines hold few segments, always the same ones."""
    sample = data[:_SAMPLE]
    return sample.count(b"\r") <= _SEGMENTS_OF_A_LINE * sample.count(b"\n")


class Block:
    """The parts of a block by index. `starts` and `ends` say where each stands, `numbers` what each means.

    `numbered` numbers what the parts mean, given the keys of all of them and a function for their texts.
    """

    def __init__(self, data: bytes, numbered: Callable[[list[bytes], Callable[[int], bytes]], array[int]]) -> None:
        self._by_lines = by_lines = _by_lines(data)
        if not by_lines and b"\r\n" in data:
            data = data.replace(b"\r\n", b"\n")
        self.data = data
        self._bytes = np.frombuffer(data, np.uint8)
        self._words: Array | None = None
        self._marks: dict[int, Array] = {}
        self._feeds = self.marks(_FEED)
        ends = self._feeds if by_lines else np.flatnonzero((self._bytes == _FEED) | (self._bytes == _RETURN))
        if not len(ends) or ends[-1] != len(data) - 1:
            ends = np.append(ends, len(data))
        self.ends = ends
        self.starts = np.concatenate((np.zeros(1, ends.dtype), ends[:-1] + 1))
        found = keys(data, by_lines=by_lines)[: len(ends)]
        self.numbers: Array = np.frombuffer(numbered(found, self.text), np.int64)

    def __len__(self) -> int:
        return len(self.ends)

    def words(self, at: Array) -> Array:
        """The eight bytes before each of these places as one integer, the first byte on top; zeros beyond the ends."""
        if self._words is None:
            padded = b"".join((bytes(_WORD), self.data, bytes(_WORD)))
            self._words = np.ndarray(len(padded) - _WORD + 1, f">u{_WORD}", padded, strides=(1,))
        words: Array = self._words[at].astype(np.uint64)
        return words

    def text(self, index: int) -> bytes:
        """One of the parts, without its end."""
        return self.data[self.starts[index] : self.ends[index]]

    def marks(self, byte: int) -> Array:
        """The places of all bytes of this value."""
        if byte not in self._marks:
            self._marks[byte] = np.flatnonzero(self._bytes == byte)
        return self._marks[byte]

    def lines_before(self, indices: Sequence[int]) -> list[int]:
        """How many lines end before each of these parts; those of the whole block for the index after the last one."""
        if self._by_lines:
            return [min(index, len(self._feeds)) for index in indices]
        starts = [self.starts[index] if index < len(self) else len(self.data) + 1 for index in indices]
        lines: list[int] = np.searchsorted(self._feeds, starts).tolist()
        return lines
