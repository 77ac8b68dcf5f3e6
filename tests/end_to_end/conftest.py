"""Keeps how the tests ended in a table, where the environment variable RESULTS names a file for it.

Rows of an earlier session that were not run again stay: the long tests need not be run in one go.
"""

from __future__ import annotations

import os
import platform
import re
from importlib import metadata
from pathlib import Path

import pytest

_FILE = os.environ.get("RESULTS")
_VERSIONS_OF = ("torch", "deepspeed", "transformers", "accelerate")
_ROW = re.compile(r"^\| `(?P<test>.+)` \| .* \|$", re.MULTILINE)
_rows: dict[str, str] = {}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        test = report.nodeid.partition("end_to_end/")[2]
        _rows[test] = f"| `{test}` | {report.outcome} | {report.duration:.0f} |"


def pytest_sessionfinish() -> None:
    if not _FILE or not _rows:
        return
    path = Path(_FILE)
    earlier = _ROW.finditer(path.read_text(encoding="utf-8")) if path.exists() else ()
    rows = {row["test"]: row.group() for row in earlier} | _rows
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in _VERSIONS_OF)
    head = [
        "# Scripts in many styles",
        "",
        f"`RESULTS=FILE pytest -m full tests/end_to_end`: Python {platform.python_version()}, {versions}, 2 ranks.",
        "",
        "| test | outcome | seconds |",
        "|---|---|---|",
    ]
    path.write_text("\n".join([*head, *(rows[test] for test in sorted(rows))]) + "\n", encoding="utf-8")
