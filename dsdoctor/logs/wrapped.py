"""Lines that were broken to fit: by a terminal at its width, or by what draws boxes, at the last space that fits."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence, Set

LEAST, MOST = 60, 400
_KINDS = 3
"""So many different lines that are all as long as the longest were broken at that length."""
_SHARE = 0.03
_TRIED = 20
_USUAL = (80, 100, 120, 132, 160, 200)
"""Columns that terminals have when nobody chooses."""
_RAISED = re.compile(r"(?:\[rank\d+\]: ?)?(?:\w+\.)*[A-Z]\w*(?:Error|Exception): ")
_GOES_ON = re.compile(r"[a-z0-9\])'\",.;/_=-]")
_NO_BREAK = re.compile(r"(?:[│┃|╮╯┐┘\s]|[-=*#_─━]{20,})$")


def width(lines: Sequence[str], told: Callable[[str], Set[str]]) -> int | None:
    """The length at which these lines were broken, None if they were not. `told` names what a text tells.

    Either lines of several kinds are all as long as the longest, which does not happen by itself, or lines of that
    length tell more together with the next one than both do alone, or are an exception whose message goes on; once is
    enough at a width that terminals have.
    """
    longest = max(map(len, lines), default=0)
    if not LEAST <= longest <= MOST:
        return None
    broken = [at for at, line in enumerate(lines) if len(line) == longest and _NO_BREAK.search(line) is None]
    kinds = {re.sub(r"\d+", "", lines[at]) for at in broken}
    ends = {lines[at][-1] for at in broken}
    if len(kinds) >= _KINDS and len(ends) > 1 and len(broken) >= _SHARE * len(lines):
        return longest
    pairs = [(lines[at], lines[at + 1]) for at in broken[:_TRIED] if at + 1 < len(lines)]
    together = sum(
        not told(one + other) <= told(one) | told(other)
        or (_RAISED.match(one) is not None and _GOES_ON.match(other) is not None)
        for one, other in pairs
    )
    return longest if together >= (1 if longest in _USUAL else _KINDS - 1) else None


def joined(lines: Sequence[str], width: int) -> Iterator[tuple[str, int]]:
    """The lines as they were before they were broken, each with the number of lines that it takes here."""
    parts: list[str] = []
    for line in lines:
        parts.append(line)
        if len(line) != width or _NO_BREAK.search(line) is not None:
            yield "".join(parts), len(parts)
            parts = []
    if parts:
        yield "".join(parts), len(parts)


_BOX = re.compile(r"(?P<head>[^│┃]*)[│┃] (?P<inner>[^│┃]*) [│┃]\s*$")


class Boxed:
    """Puts messages together that run over several lines of a box; the number of such a line is that of its first."""

    def __init__(self) -> None:
        self._head = ""
        self._text = ""
        self._last = ""
        self._line = 0

    @property
    def open(self) -> bool:
        """True while a message may go on in the next line."""
        return self._line > 0

    def feed(self, text: str, line: int) -> list[tuple[str, int]]:
        """The texts that are complete when this line comes, with the numbers of their lines."""
        match = _BOX.match(text)
        if match is None:
            return [*self.take(), (text, line)]
        head, inner = match["head"], match["inner"]
        if self.open and _shape(head) == _shape(self._head) and _goes_on(self._last, inner):
            self._text += _glue(self._last, inner) + inner.strip()
            self._last = inner
            return []
        complete = self.take()
        self._head, self._text, self._last, self._line = head, inner.rstrip(), inner, line
        return complete

    def take(self) -> list[tuple[str, int]]:
        """The message that was being put together, if there is one."""
        complete = [(self._head + self._text, self._line)] if self.open else []
        self._line = 0
        return complete


def _shape(head: str) -> str:
    """What stands before a box, with other times and numbers in each line."""
    return re.sub(r"\d+", "0", head)


def _goes_on(line: str, following: str) -> bool:
    """True if the first word of what follows had no room any more."""
    word = following.split(maxsplit=1)[:1]
    same = len(line) == len(following)
    return same and bool(word and line.strip()) and len(line.rstrip()) + 1 + len(word[0]) > len(line)


def _glue(line: str, following: str) -> str:
    """What stood between: a space, or nothing within a word or number that is too long for a line."""
    full = len(line.rstrip()) == len(line)
    cut = " " not in line.strip() or (line[-1].isdigit() and following[:1].isdigit())
    return "" if full and cut else " "
