"""What passes between the parent and the ranks of the communication check: one order in, one record file a rank out.

A record file holds JSON lines, each with `event` and `time` (seconds since the epoch):
`hello` (rank, pid, host), `chosen` (device, backend), `begin` (step, dtype), `end` (step, dtype, status, seconds,
text, peers), `timeout` (step, dtype, seconds, stack, peers), `terminated` (the same, when SIGTERM came). `peers` maps
ranks of the same host to the state of their process: a letter of `/proc/PID/stat`, or `gone`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

LAST_STEP = "goodbye"
"""The step after which nothing that happens to a rank proves anything."""


@dataclass(frozen=True, kw_only=True)
class CommOrder:
    """What every rank has to do. `deadline` is in seconds, for each step."""

    folder: str
    device: Literal["auto", "cpu", "cuda"]
    dtypes: tuple[str, ...]
    deadline: float

    def write(self) -> Path:
        """Write the order into its folder and return the path."""
        path = Path(self.folder) / "spec.json"
        path.write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")
        return path

    @classmethod
    def read(cls, path: str | Path) -> CommOrder:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
        return cls(**{**values, "dtypes": tuple(values["dtypes"])})


def record_path(folder: str | Path, rank: int) -> Path:
    return Path(folder) / f"comm-rank{rank}.jsonl"


def read_records(folder: str | Path, rank: int) -> list[dict[str, Any]]:
    """The records of one rank, none for a rank that wrote nothing; a last line cut off by a kill is left out."""
    try:
        text = record_path(folder, rank).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return list(_parse(text))


def _parse(text: str) -> Iterator[dict[str, Any]]:
    with contextlib.suppress(ValueError):
        for line in text.splitlines():
            yield json.loads(line)
