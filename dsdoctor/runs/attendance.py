"""What the attendants of the ranks wrote down (`runs.attendant`): how each rank's process began and ended."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LIFE_LINE = "alive.lock"
"""File in the run's folder that dsdoctor holds a lock on as long as it lives; the kernel frees it whatever happens."""
VARIABLES = "environment.json"
"""File in the run's folder with the variables that dsdoctor sets; launchers hand only some on to other nodes."""
STACK_REQUEST = "stacks-wanted.txt"
"""File in the run's folder whose every new content asks the ranks for their stacks."""


@dataclass(frozen=True, kw_only=True)
class Attendance:
    """One rank's process. Times are unix seconds.

    `told` is when the launcher (or another process) first asked the rank to end by a signal. `deserted` says that it
    was ended since the launcher or dsdoctor had gone. `state` is the kernel's letter for the process when it was asked
    for its stacks: T is stopped, D waits in the kernel. `answers` is False where it could not write them. `oom_kills`
    is by how much the count of out-of-memory kills grew in the rank's control group (which may be on another node).
    """

    rank: int
    pid: int | None = None
    host: str = ""
    exit_code: int | None = None
    ended: float | None = None
    told: float | None = None
    deserted: bool = False
    state: str = ""
    answers: bool = False
    oom_kills: int = 0

    @property
    def began(self) -> bool:
        return self.pid is not None

    @property
    def over(self) -> bool:
        """The rank's process has ended."""
        return self.exit_code is not None


def attendance_path(folder: str | Path, rank: int) -> Path:
    return Path(folder) / f"process-rank{rank}.jsonl"


def read_attendance(folder: str | Path, rank: int) -> Attendance:
    """What is known of that rank's process; only its number where nothing was written."""
    values: dict[str, Any] = {"rank": rank}
    for event in _events(attendance_path(folder, rank)):
        kind = event["event"]
        if kind == "start":
            values.update(pid=event["pid"], host=event["host"])
        elif kind == "end":
            values.update(exit_code=event["exit_code"], ended=event["t"], deserted=event["deserted"])
            values.update(oom_kills=event.get("oom_kills", 0))
        elif kind == "told":
            values.setdefault("told", event["t"])
        elif kind == "asked":
            values.update(state=event["state"], answers=event["answers"])
    return Attendance(**values)


def _events(path: Path) -> Iterator[dict[str, Any]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        with contextlib.suppress(ValueError):  # the last line of a killed attendant
            yield json.loads(line)
