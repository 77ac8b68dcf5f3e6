"""Which of many lines hold one of many texts."""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any

_WORTH_IT = 1 << 16
"""Bytes from which on it is worth to load the engine."""


class Search:
    """Looks for the same texts again and again, none of which has a line end.

    In many lines they are looked for by hyperscan, which has no package for some machines: there one by one as well.
    """

    def __init__(self, texts: Sequence[bytes]) -> None:
        self._texts = tuple(texts)

    def among(self, lines: Collection[bytes]) -> list[bytes]:
        """Those of the lines in which one of the texts stands, in their order."""
        ends = list(accumulate(len(line) + 1 for line in lines))
        if not lines or ends[-1] < _WORTH_IT or self._engine is None:
            joined = b"\n".join(lines)
            present = [text for text in self._texts if text in joined]
            return [line for line in lines if any(text in line for text in present)] if present else []
        found: set[int] = set()
        self._engine.scan(b"\n".join(lines), match_event_handler=lambda number, start, end, *_: found.add(end))
        ordered = iter(sorted(found))
        hits, at = [], next(ordered, -1)
        for line, end in zip(lines, ends, strict=True):
            if 0 <= at < end:
                hits.append(line)
                at = next((other for other in ordered if other > end), -1)
        return hits

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
