"""Take a line out of what terminals, launchers and log collectors put around it, and learn the rank from that."""

from __future__ import annotations

import re
from dataclasses import dataclass

_ESCAPES = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]|(?:\x1b\]|\x9d)[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?|\x1b[@-Z\\-_]"
    r"|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]"
)
_RANKED = re.compile(
    r"\[(?:rank|default|Rank |RANK )(?P<rank>\d+)\]:? ?"
    r"|[Rr]ank ?(?P<named>\d+): (?=\s|\[|Traceback|(?:\w+\.)*[A-Z]\w*(?:Error|Exception)\b)"
    r"|\[\d+,(?P<mpi>\d+)\](?:<std(?:out|err|diag)>:|:)? ?"
    r"|(?P<srun>\d{1,5}): (?=\S|\s{2})"
)
_UNRANKED = re.compile(
    r"(?:worker|node|host|gpu|trainer|master|launcher)[\w.-]*: ?(?=\S|\s{2})"  # pdsh
    r"|(?:\d{1,3}(?:\.\d{1,3}){3}|[a-z][a-z\d-]*\d[\w.-]*): (?=\s|\[|Traceback|(?:\w+\.)*[A-Z]\w*(?:Error|Exception)\b)"
    r"|\((?:[\w.:]+ )?pid=\d+(?:, ip=[\d.]+)?\) ?"  # Ray
    r"|[\w.-]+ +\| ?"  # docker compose
    r"|\[pod/[^\]]+\] ?"  # kubectl
    r"|\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)? (?:\[\w+\] ){0,3}(?:std(?:out|err) [FP] )?"
    r"|(?:> ?)+"  # quoted mail
    r"|[│┃|] (?=.*[│┃|]\s*$)"  # a box
)
_MAX_PREFIXES = 6
_ANOTHER_RANK = re.compile(r"(?<=[^\s>|])(?<![\]>]:)(?=\[(?:rank|default)\d+\]:)")


@dataclass(frozen=True)
class Unwrapped:
    """The line itself, its rank (None if no prefix says it) and where that stood, and the prefix that was taken off."""

    text: str
    rank: int | None
    prefix: str
    rank_at: int | None = None


def unwrap(line: str) -> Unwrapped:
    """Take off escapes and prefixes, in any stack."""
    if "\x1b" in line or not line.isprintable():
        line = _ESCAPES.sub("", line)
    rank: int | None = None
    rank_at: int | None = None
    position = 0
    for _ in range(_MAX_PREFIXES):
        match = _RANKED.match(line, position)
        if match is not None:
            named = match.lastgroup or "rank"
            if rank is None or named != "srun":
                rank, rank_at = int(match[named]), match.start(named)
        else:
            match = _UNRANKED.match(line, position)
            if match is None:
                break
        position = match.end()
    text = line[position:]
    if (
        position
        and line[position - 1] in " "
        and line[:position].rstrip()[-1:] in "│┃|"
        and text.rstrip()[-1:] in "│┃|"
    ):
        text = text.rstrip()[:-1].rstrip()
    return Unwrapped(text, rank, line[:position], rank_at)


def apart(line: str) -> list[str]:
    """The texts of several ranks that were written into one line, each with its prefix."""
    return _ANOTHER_RANK.split(line) if line.count("]:") > 1 else [line]
