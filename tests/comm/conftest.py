"""Keeps the results of the long tests of this folder: every fault, how it ended, in tests/results/comm_faults.md."""

from __future__ import annotations

import platform
import sys
from datetime import date
from pathlib import Path

import pytest

RESULTS = Path(__file__).parents[1] / "results" / "comm_faults.md"
ABOUT = """# Faults between ranks and nodes

Written by `pytest -m "full or not full" tests/comm`, when all of test_nodes.py and test_starts.py has run: real
processes over gloo, nodes in network namespaces, starts by real or (see test_starts.py) stand-in launchers.
"""
EVERY = "full or not full"
"""The marker expression under which no test is left out."""
_KEPT = ("test_nodes.py", "test_starts.py")
_seen = pytest.StashKey[dict]()


def pytest_configure(config):
    config.stash[_seen] = {}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.when == "call" or report.skipped:
        item.config.stash[_seen][item.nodeid] = (report.outcome, report.duration)
    return report


def pytest_sessionfinish(session):
    kept = {name: told for name, told in session.config.stash[_seen].items() if any(file in name for file in _KEPT)}
    complete = {session.config.getoption("markexpr") == EVERY, *(any(f in name for name in kept) for f in _KEPT)}
    if complete != {True} or session.config.getoption("keyword") or hasattr(session.config, "workerinput"):
        return
    import torch

    rows = [f"| {name.partition('::')[2]} | {outcome} | {seconds:.0f} s |" for name, (outcome, seconds) in kept.items()]
    where = f"Python {platform.python_version()}, torch {torch.__version__}, {sys.platform}, {date.today()}."
    RESULTS.write_text("\n".join([ABOUT, where, "", "| test | outcome | time |", "|---|---|---|", *rows, ""]))
