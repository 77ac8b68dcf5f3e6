"""The check on all hosts of a hostfile: started by the deepspeed launcher, heard through its output.

The launcher's ways to other hosts (pdsh, ssh, mpirun) all bring the output of every rank here, some with `HOST: ` in
front of each line. Only the process that speaks for everyone prints a document.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dsdoctor.runs.launcher import LaunchPlan, environment
from dsdoctor.runs.processes import LAUNCHER_OUTPUT, Processes

_PREFIX = re.compile(r"^[\w.-]+: ?", re.MULTILINE)


def run(hostfile: str, arguments: Sequence[str], *, folder: Path, device: Any, timeout: float) -> Path:
    """Start `dsdoctor comm --json ARGUMENTS` on every slot; the file with all that was printed.

    Ends after `timeout` seconds at the latest, and nothing of it remains on this host.
    """
    output = folder / LAUNCHER_OUTPUT
    plan = LaunchPlan(nproc=1, launcher="deepspeed", hostfile=hostfile, device=device)
    line = [sys.executable, "-m", "deepspeed.launcher.runner", f"--hostfile={hostfile}", "--module", "dsdoctor"]
    end = time.monotonic() + timeout
    with Processes(folder) as processes:
        processes.start([*line, "comm", "--json", *arguments], environment(plan, folder), Path.cwd(), output)
        while processes.poll() is None and time.monotonic() < end:
            processes.members()
            time.sleep(0.2)
    return output


def documents(output: str) -> Iterator[dict[str, Any]]:
    """Every document of a check in what a launcher printed, rank 0's first where it could be heard."""
    found = [*_read(output), *_read(_PREFIX.sub("", output))]
    yield from sorted(found, key=lambda one: one["comm"]["seen_by"] is not None)


def _read(text: str) -> Iterator[dict[str, Any]]:
    decoder = json.JSONDecoder()
    for begin in re.finditer(r'^\{\s*"schema": 1', text, re.MULTILINE):
        with contextlib.suppress(ValueError):
            value, _ = decoder.raw_decode(text, begin.start())
            if isinstance(value.get("comm"), dict):
                yield value
