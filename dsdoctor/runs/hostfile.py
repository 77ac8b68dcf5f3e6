"""The hosts of a job and how many ranks each takes, as DeepSpeed's launcher reads them from a hostfile."""

from __future__ import annotations

import re
from pathlib import Path

_ENTRY = re.compile(r"(?P<host>\S+)\s+slots=(?P<slots>\d+)(?:\s.*)?")


class Malformed(ValueError):
    """A hostfile that the deepspeed launcher would not take; the message says where and why."""


def hosts(path: str | Path) -> dict[str, int]:
    """Slots by host: `HOST slots=N`, one a line; what follows the number is not read, `#` begins a comment.

    The grammar is that of `_parse_hostfile` in deepspeed/launcher/runner.py. Raises Malformed, OSError.
    """
    found: dict[str, int] = {}
    for number, line in enumerate(Path(path).read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
        text = line.split("#", 1)[0].strip()
        if not text:
            continue
        entry = _ENTRY.fullmatch(text)
        if entry is None:
            raise Malformed(f"{path}:{number}: {_shown(text)} is not of the form HOST slots=N")
        if entry["host"] in found:
            raise Malformed(f"{path}:{number}: {entry['host']} is there twice")
        found[entry["host"]] = int(entry["slots"])
    if not sum(found.values()):
        raise Malformed(f"{path}: no slots in it")
    return found


def _shown(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:80]}…")
