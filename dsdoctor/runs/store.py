"""Finished runs kept in the report folder, so that a repeated call with the same inputs can reuse them.

A run is found again by a key over everything that decides it: the order given to the ranks, the launch plan, the
bytes of the script, and the versions. Files that the script reads or imports are not part of it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

from dsdoctor.runs.facts import Run
from dsdoctor.runs.launcher import LaunchPlan
from dsdoctor.runs.spec import RunSpec

_FILE = "run.json"


def key_of(spec: RunSpec, plan: LaunchPlan, versions: Mapping[str, str]) -> str:
    """The key of a run, a hexadecimal hash."""
    order = {name: value for name, value in asdict(spec).items() if name != "folder"}
    script = Path(spec.script)
    content = hashlib.sha256(script.read_bytes()).hexdigest() if script.is_file() else ""
    decided = [order, asdict(plan), content, dict(sorted(versions.items()))]
    return hashlib.sha256(json.dumps(decided, sort_keys=True, default=str).encode()).hexdigest()


def keep(run: Run, key: str) -> None:
    """Write the run into its own folder. One that cannot be kept (the disk is full, the folder gone) is made anew."""
    from pydantic import TypeAdapter

    values = TypeAdapter(Run).dump_python(run)
    with contextlib.suppress(OSError):
        (Path(run.folder) / _FILE).write_text(json.dumps({"key": key, "run": values}), encoding="utf-8")


def recall(reports: Path, name: str, key: str) -> Run | None:
    """The newest finished run of that name and key below the folder of numbered reports, or None."""
    from pydantic import TypeAdapter

    for stored in _newest(reports, name):
        try:
            content = json.loads(stored.read_text(encoding="utf-8"))
            if content["key"] == key and content["run"]["outcome"] != "interrupted":
                return TypeAdapter(Run).validate_python(content["run"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return None


def _newest(reports: Path, name: str) -> Iterator[Path]:
    numbered = [folder for folder in reports.iterdir() if folder.name.isdigit()]
    for folder in sorted(numbered, key=lambda f: int(f.name), reverse=True):
        path = folder / name / _FILE
        if path.is_file():
            yield path
