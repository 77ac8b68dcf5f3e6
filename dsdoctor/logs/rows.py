"""What a row of the grammar is: a kind of line, literals of which one stands in it, and its expression."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True, eq=False)
class LinePattern:
    """One kind of line. Its expression is compiled when a line first has one of its literals: few logs have many.

    Rows are told apart by identity, which takes no time.
    """

    kind: str
    literals: tuple[str, ...]
    source: str

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        return re.compile(self.source)


def row(kind: str, literals: str | tuple[str, ...], pattern: str) -> LinePattern:
    return LinePattern(kind, (literals,) if isinstance(literals, str) else literals, pattern)


NUMBER = r"[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|nan|NaN|inf|Infinity)"

PLAIN = r"\d+(?:\.\d+)?"
