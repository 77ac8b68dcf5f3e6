"""The experiment that people do by hand when NCCL fails or hangs: once more with its log, without P2P, without IB, over
gloo. What passes with one thing left out says where the fault is.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from dsdoctor.comm import check as checking
from dsdoctor.comm.facts import CommFacts, Experiment
from dsdoctor.logs.facts import LogFacts
from dsdoctor.runs.launcher import LaunchPlan

_LOG = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET,GRAPH,ENV"}
WITHOUT: Mapping[str, Mapping[str, str]] = {
    "NCCL without P2P": {"NCCL_P2P_DISABLE": "1"},
    "NCCL without InfiniBand": {"NCCL_IB_DISABLE": "1"},
    "NCCL without P2P, shared memory and InfiniBand": {
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
        "NCCL_IB_DISABLE": "1",
    },
}

Check = Callable[..., CommFacts]


def with_experiments(
    plan: LaunchPlan,
    *,
    config: Mapping[str, Any],
    folder: Path,
    deadline: float,
    check: Check = checking.check,
) -> tuple[CommFacts, LogFacts | None]:
    """The check, and where it fails on NCCL the experiments and what NCCL logged. `check` is for tests.

    Each experiment has the deadline of a step for every step, and three of them and 30 s for the whole.
    """

    def once(name: str, plan: LaunchPlan) -> CommFacts:
        return check(plan, config=config, folder=folder / name, deadline=deadline, timeout=3 * deadline + 30)

    facts = once("given", plan)
    if facts.passed or facts.backend != "nccl" or not facts.ranks:
        return facts, None
    logs = folder / "nccl"
    logs.mkdir()
    done = []
    with _environment({**_LOG, "NCCL_DEBUG_FILE": str(logs / "nccl.%h.%p.log")}):
        for number, (name, variables) in enumerate(WITHOUT.items()):
            with _environment(variables):
                done.append(_result(name, variables, once(f"without-{number}", plan)))
            if done[-1].passed:
                break
    done.append(_result("gloo", {}, once("gloo", replace(plan, device="cpu"))))
    return replace(facts, experiments=tuple(done)), _read(logs)


def _result(name: str, variables: Mapping[str, str], facts: CommFacts) -> Experiment:
    return Experiment(name=name, variables=dict(variables), passed=facts.passed, problem=facts.problem)


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Variables for the ranks that are started meanwhile; what the user set is there again afterwards."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _read(folder: Path) -> LogFacts | None:
    from dsdoctor.logs.read import Unreadable, read_logs

    try:
        return read_logs([folder])
    except Unreadable:
        return None
