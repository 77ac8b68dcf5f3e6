"""Which of many texts stand in a long one: with hyperscan where it is installed, else one text after the other."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from functools import cached_property
from typing import Any

_WORTH_IT = 1 << 16
"""Bytes from which on it is worth to load the engine."""


class Search:
    """Looks for the same texts again and again. The results do not depend on the engine."""

    def __init__(self, texts: Sequence[bytes]) -> None:
        self._texts = tuple(texts)

    def present(self, data: bytes) -> list[bytes]:
        """Those of the texts that stand in `data`, in their order."""
        if len(data) < _WORTH_IT or self._engine is None:
            return [text for text in self._texts if text in data]
        found: set[int] = set()
        self._engine.scan(data, match_event_handler=lambda number, *_: found.add(number))
        return [self._texts[number] for number in sorted(found)]

    @cached_property
    def _engine(self) -> Any:
        if importlib.util.find_spec("hyperscan") is None:
            return None
        import hyperscan

        try:
            engine = hyperscan.Database()
            numbers = list(range(len(self._texts)))
            once = [hyperscan.HS_FLAG_SINGLEMATCH] * len(numbers)
            engine.compile(expressions=list(self._texts), ids=numbers, elements=len(numbers), flags=once, literal=True)
        except hyperscan.HyperscanError:  # not for this processor
            return None
        return engine
