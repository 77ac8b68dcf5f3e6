"""Keeps what the mutation suite found: one JSON line a case, and a table for people."""

from __future__ import annotations

import fcntl
import json
import platform
from collections.abc import Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results"
LINES = RESULTS / "mutations.jsonl"
TABLE = RESULTS / "mutations.md"
_NAMES = ("torch", "deepspeed", "transformers", "accelerate")


def known(name: str, key: str) -> bool:
    """Whether this very case was recorded as right."""
    return any(entry["name"] == name and entry["key"] == key and not entry["wrong"] for entry in _read())


def record(name: str, key: str, wrong: Sequence[str], verdict: dict[str, Any], *, seconds: float) -> None:
    """Replace what is recorded of a case, and write the table anew."""
    entry = {
        "name": name,
        "key": key,
        "wrong": list(wrong),
        "blame": verdict["blame"],
        "culprit": verdict["culprit"],
        "seconds": round(seconds),
        "date": date.today().isoformat(),
    }
    with open(LINES, "a+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # parts of the suite may run at the same time
        entries = sorted([*(e for e in _read() if e["name"] != name), entry], key=lambda e: e["name"])
        file.truncate(0)
        file.write("".join(json.dumps(e) + "\n" for e in entries))
        TABLE.write_text(table(entries), encoding="utf-8")


def _read() -> list[dict[str, Any]]:
    if not LINES.is_file():
        return []
    return [json.loads(line) for line in LINES.read_text(encoding="utf-8").splitlines()]


def table(entries: Sequence[dict[str, Any]]) -> str:
    """Score and table in Markdown."""
    right = sum(not entry["wrong"] for entry in entries)
    versions = ", ".join(f"{name} {version(name)}" for name in _NAMES)
    rows = "\n".join(
        f"| {e['name']} | {e['blame']} | {', '.join(e['culprit'])} | {'; '.join(e['wrong']) or 'right'} |"
        for e in entries
    )
    return f"""# Seeded faults: what was planted and what dsdoctor triage named

Written by `pytest -m full tests/mutations`; only cases that were run are listed. Python {platform.python_version()},
{versions}; 2 ranks on the CPU, gloo.

**{right} of {len(entries)} right.**

| case | blame | culprit | |
|---|---|---|---|
{rows}
"""
