"""Which of many lines hold one of many texts."""

from __future__ import annotations

import importlib.util
from bisect import bisect_left
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any

_WORTH_IT = 1 << 16
"""Bytes from which on it is worth to load the engine."""
_AND_END = (1).__add__


class Search:
    """Looks for the same texts again and again; the end of a line may be the end of a text.

    In many lines they are looked for by hyperscan, which has no package for some machines: there one by one as well.
    """

    def __init__(self, texts: Sequence[bytes]) -> None:
        self._texts = tuple(texts)

    def among(self, lines: Sequence[bytes]) -> list[int]:
        """The indices of the lines in which one of the texts stands, in order."""
        joined = b"\n".join((*lines, b""))
        if len(joined) < _WORTH_IT or self._engine is None:
            present = [text for text in self._texts if text in joined]
            return [at for at, line in enumerate(lines) if any(text in line + b"\n" for text in present)]
        found: set[int] = set()
        self._engine.scan(joined, match_event_handler=lambda number, start, end, *_: found.add(end))
        ends = list(accumulate(map(_AND_END, map(len, lines))))
        return sorted({bisect_left(ends, end) for end in found})

    @cached_property
    def _engine(self) -> Any:
        if importlib.util.find_spec("hyperscan") is None:
            return None
        import hyperscan

        try:
            engine = hyperscan.Database()
            numbers = list(range(len(self._texts)))
            engine.compile(expressions=list(self._texts), ids=numbers, elements=len(numbers), literal=True)
        except hyperscan.HyperscanError:  # not for this processor
            return None
        return engine
