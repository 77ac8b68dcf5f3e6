"""Lines that a terminal broke at its width: which width that was, and the lines as they were."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

LEAST, MOST = 60, 400
_KINDS = 3
"""So many different lines that are all as long as the longest were broken at that length."""
_SHARE = 0.03
_TRIED = 20
_NO_BREAK = re.compile(r"(?:[│┃|╮╯┐┘\s]|[-=*#_─━]{20,})$")


def width(lines: Sequence[str], means: Callable[[str], bool]) -> int | None:
    """The length at which these lines were broken, None if they were not.

    Either lines of several kinds are all as long as the longest, which does not happen by itself, or lines of that
    length mean something only together with the next one.
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
    together = sum(means(one + other) and not means(one) and not means(other) for one, other in pairs)
    return longest if together >= _KINDS - 1 else None


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
