"""The command as a user starts it, in a folder of its own, and what its document says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

Document = dict[str, Any]


def call(
    arguments: Sequence[str], cwd: Path, *script_args: str, limit: float = 400, env: Mapping[str, str] | None = None
) -> tuple[int, Document]:
    """Run dsdoctor and give back its exit code and its document; nothing of it may be left running."""
    command = [sys.executable, "-m", "dsdoctor", *arguments, "--json", "--", *script_args]
    finished = subprocess.run(
        command, cwd=cwd, env={**os.environ, **(env or {})}, capture_output=True, text=True, timeout=limit, check=False
    )
    assert "Traceback" not in finished.stderr, finished.stderr
    assert not left_over(cwd)
    return finished.returncode, json.loads(finished.stdout)


def left_over(cwd: Path) -> list[psutil.Process]:
    """Processes that work in this folder."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.cwd() == str(cwd) and process.pid != os.getpid():
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


def ids(document: Document, severity: str | None = None) -> list[str]:
    return [f["id"] for f in document["findings"] if severity in (None, f["severity"])]


def stage(document: Document, name: str) -> Document:
    found: Document = next(stage for stage in document["stages"] if stage["name"] == name)
    return found


def notes(document: Document, name: str = "with-deepspeed") -> list[str]:
    """What was changed for a run."""
    return list(stage(document, name)["details"]["notes"])


def steps(document: Document, name: str) -> int:
    """Optimizer steps of rank 0 in that stage's run."""
    return len(stage(document, name)["details"]["ranks"][0]["steps"])
