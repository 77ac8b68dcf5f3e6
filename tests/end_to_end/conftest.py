"""Keeps the outcome of the tests in a table, where the environment variable RESULTS names a file for it."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path

import pytest

_FILE = os.environ.get("RESULTS")
_rows: dict[str, tuple[str, float]] = {}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        _rows[report.nodeid] = (report.outcome, report.duration)


def pytest_sessionfinish() -> None:
    if not _FILE or not _rows:
        return
    versions = ", ".join(
        f"{name} {metadata.version(name)}" for name in ("torch", "deepspeed", "transformers", "accelerate")
    )
    lines = ["# Scripts in many styles", ""]
    lines += [
        f"`RESULTS=FILE pytest -m full tests/end_to_end`, Python {platform.python_version()}, {versions}, 2 ranks.",
        "",
    ]
    lines += ["| test | outcome | seconds |", "|---|---|---|"]
    lines += [
        f"| `{name.partition('end_to_end/')[2]}` | {outcome} | {took:.0f} |" for name, (outcome, took) in _rows.items()
    ]
    Path(_FILE).write_text("\n".join(lines) + "\n", encoding="utf-8")
