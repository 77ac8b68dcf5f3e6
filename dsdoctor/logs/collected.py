"""Prefixes of collectors of logs that nobody lists: learned from the heads of tracebacks.

The head of a traceback begins a line of its own, so whatever stands before it was put there by what collected the log:
a time, a machine, a stream, the name of a task. It stands before the lines that follow, too.
The same goes for the indentation of a log that was pasted into a text.
"""

from __future__ import annotations

import re

from dsdoctor.logs.grammar import TRACEBACK
from dsdoctor.logs.unwrap import plain, rank_begins

_MAX_LEARNED = 16
_MAX_PREFIX = 120
_FRAME = re.compile(r'^(?:\[\w+ ?\d+\]:? ?)?\s+File "|^[│┃] ')
_NOT_A_PREFIX = re.compile(r"[│┃╭]|^\w+ {2,}$")
"""The frame of a box, or the type that IPython prints before the head."""


class Collected:
    """The prefixes of one source. `without_prefix` takes off what `learn` has seen; numbers in it may be others.

    One counts once the line after the head has it too: before a frame, where a word before a quotation has none.
    """

    def __init__(self) -> None:
        self._learned: dict[str, re.Pattern[str]] = {}
        self._seen: dict[str, re.Pattern[str]] = {}
        self._indent = ""

    def learn(self, line: str) -> None:
        """Take what stands before the head of a traceback in this line, without the rank, which unwrapping finds."""
        head = plain(line)
        before = head[: head.find(TRACEBACK)]
        before = before[: rank_begins(before)]
        self._indent = before if before.isspace() else ""
        if not before.strip() or len(before) > _MAX_PREFIX or _NOT_A_PREFIX.search(before) is not None:
            return
        shape = re.sub(r"\d+", "0", before)
        if shape not in self._learned and len(self._learned) + len(self._seen) < _MAX_LEARNED:
            self._seen[shape] = re.compile(re.escape(shape).replace("0", r"\d+"))

    def without_prefix(self, line: str) -> str:
        """The line without its prefix, and without the indentation of the last head."""
        if not (self._learned or self._seen):
            return line.removeprefix(self._indent)
        text = plain(line)
        for shape, pattern in (*self._learned.items(), *self._seen.items()):
            if (match := pattern.match(text)) is None:
                continue
            rest = text[match.end() :]
            if shape in self._learned or TRACEBACK in rest:
                return rest
            del self._seen[shape]
            if _FRAME.search(rest) is not None:
                self._learned[shape] = pattern
                return rest
        return line.removeprefix(self._indent)
