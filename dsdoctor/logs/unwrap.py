"""Take a line out of what terminals, launchers and log collectors put around it, and learn the rank from that."""

from __future__ import annotations

import re
from dataclasses import dataclass

_ESCAPES = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]|(?:\x1b\]|\x9d)[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?|\x1b[@-Z\\-_]"
    r"|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]"
)
_RANK = re.compile(r"\[(?:rank|default|Rank |RANK )\d+\]:? ?$")
_RANKED = re.compile(
    r"\[(?:rank|default|Rank |RANK )(?P<rank>\d+)\]:? ?"
    r"|[Rr]ank ?(?P<named>\d+): (?=\s|\[|Traceback|(?:\w+\.)*[A-Z]\w*(?:Error|Exception)\b)"
    r"|\[\d+,(?P<mpi>\d+)\](?:<std(?:out|err|diag)>:|:)? ?"
    r"|(?P<srun>\d{1,5}): (?=\S|\s{2}|\t)"
)
_UNRANKED = re.compile(
    r"(?P<host>(?:worker|node|host|gpu|trainer|master|launcher)[\w.-]*)(?!:\d+:\d+ \[): ?(?=\S|\s{2})"  # pdsh
    r"|(?P<address>\d{1,3}(?:\.\d{1,3}){3}|[a-z][a-z\d-]*\d[\w.-]*):"
    r" (?=\s|\[|Traceback|(?:\w+\.)*[A-Z]\w*(?:Error|Exception)\b)"
    r"|(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec) +\d{1,2} \d\d:\d\d:\d\d(?:\.\d+)? (?P<syslog>[\w.-]+)"
    r" [\w./@-]+(?:\[\d+\])?: ?"  # syslog, the journal
    r"|\((?:[\w.:]+ )?pid=\d+(?:, ip=[\d.]+)?\) ?"  # Ray
    r"|[\w.-]+ +\| ?"  # docker compose
    r"|\[pod/[^\]]+\] ?"  # kubectl
    r"|\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)? (?:\[\w+\] ){0,3}(?:std(?:out|err) [FP] )?"
    r"|(?:> ?)+"  # quoted mail
    r"|[│┃|] (?=.*[│┃|]\s*$)"  # a box
)
_NCCL = re.compile(r"(?P<host>[\w.-]+):\d+:\d+ \[\d+\] NCCL ")
_MAX_PREFIXES = 6
_ANOTHER = re.compile(
    r"\[(?:(?<=[^\s>|]\[)(?<![\]>]:\[)(?:rank|default)\d+\]:"
    r"|(?<=[\w.)\]}]\[)\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}\] \[[A-Z]+\] \[)"
    r"|\{(?<=\}\{)['\"]loss['\"]: "
    r"|T(?<=[\w.)\]}]T)(?<!\\nT)raceback \(most recent call last\):"
)
"""Where in a line another text begins: of another rank, of DeepSpeed's logger, of the Trainer, of Python."""


@dataclass(frozen=True)
class Unwrapped:
    """The line itself, its rank and where that stood, the prefix that was taken off, and the host.

    Rank and host are None if neither a prefix nor, for the host, NCCL says them.
    """

    text: str
    rank: int | None
    prefix: str
    rank_at: int | None = None
    host: str | None = None


def plain(line: str) -> str:
    """The line without escapes and control characters."""
    return _ESCAPES.sub("", line) if "\x1b" in line or not line.isprintable() else line


def rank_begins(prefix: str) -> int:
    """Where in a prefix that which names a rank begins, its length if nothing does."""
    match = _RANK.search(prefix)
    return match.start() if match is not None else len(prefix)


def unwrap(line: str) -> Unwrapped:
    """Take off escapes and prefixes, in any stack."""
    line = plain(line)
    rank: int | None = None
    rank_at: int | None = None
    host: str | None = None
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
            host = match["host"] or match["address"] or match["syslog"] or host
        position = match.end()
    text = line[position:]
    if (
        position
        and line[position - 1] in " "
        and line[:position].rstrip()[-1:] in "│┃|"
        and text.rstrip()[-1:] in "│┃|"
    ):
        text = text.rstrip()[:-1].rstrip()
    if " NCCL " in text and (match := _NCCL.match(text)) is not None:
        host = match["host"]
    return Unwrapped(text, rank, line[:position], rank_at, host)


def apart(line: str) -> list[str]:
    """The texts of several ranks, or programs, that were written into one line, each with its prefix."""
    parts, begin = [], 0
    for match in _ANOTHER.finditer(line):
        parts.append(line[begin : match.start()])
        begin = match.start()
    return [*parts, line[begin:]]
