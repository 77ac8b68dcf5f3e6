"""The experiment that people do by hand when NCCL fails or hangs: once more, without P2P, without IB, over another
interface, over gloo. What passes with one thing left out says where the fault is.
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
from dsdoctor.comm.nccl_log import NCCL_LOG, NcclOutput
from dsdoctor.runs.launcher import LaunchPlan
from dsdoctor.runs.processes import LAUNCHER_OUTPUT

EXPERIMENTS: Mapping[str, Mapping[str, str]] = {
    "NCCL once more, with its own diagnostics": {"NCCL_RUN_DIAGNOSTICS": "1"},
    "NCCL without P2P": {"NCCL_P2P_DISABLE": "1"},
    "NCCL without InfiniBand": {"NCCL_IB_DISABLE": "1"},
    "NCCL over the loopback": {"NCCL_SOCKET_IFNAME": "lo"},
    "NCCL without P2P, shared memory and InfiniBand": {
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
        "NCCL_IB_DISABLE": "1",
    },
}
"""What is tried, in this order, until one passes. NCCL has diagnostics of its own since 2.31, older ones ignore it."""
_OVER_GLOO = "gloo"

Check = Callable[..., CommFacts]


def with_experiments(
    plan: LaunchPlan,
    *,
    config: Mapping[str, Any],
    folder: Path,
    deadline: float,
    check: Check = checking.check,
    tell: Callable[[str], None] = lambda text: None,
) -> tuple[CommFacts, NcclOutput]:
    """The check, and where it fails on NCCL the experiments and what NCCL said: of the check as it was given alone.

    What it logs under changed settings is true of those only. Each run has the deadline of a step for every step, and
    three of them and 30 s for the whole. `tell` is told what is tried; `check` is for tests.
    """
    logs = folder / "nccl"
    logs.mkdir()
    said = {**NCCL_LOG, "NCCL_DEBUG_FILE": str(logs / "nccl.%h.%p.log")}

    def once(name: str, plan: LaunchPlan, variables: Mapping[str, str]) -> CommFacts:
        with _environment(variables):
            return check(plan, config=config, folder=folder / name, deadline=deadline, timeout=3 * deadline + 30)

    facts = once("given", plan, {name: value for name, value in said.items() if name not in os.environ})
    if facts.passed or facts.backend != "nccl" or not _came_to_nccl(facts):
        return facts, NcclOutput()
    done: list[Experiment] = []
    for number, (name, variables) in enumerate(EXPERIMENTS.items()):
        tell(f"the check failed over NCCL; trying: {name}")
        done.append(_result(name, variables, once(f"experiment-{number}", plan, variables)))
        if done[-1].passed:
            break
    tell("trying: gloo instead of NCCL")
    done.append(_result(_OVER_GLOO, {}, once(_OVER_GLOO, replace(plan, device="cpu"), {})))
    printed = folder / "experiment-0" / LAUNCHER_OUTPUT
    output = NcclOutput(logs=logs if any(logs.iterdir()) else None, printed=printed if printed.exists() else None)
    return replace(facts, experiments=tuple(done)), output


def _came_to_nccl(facts: CommFacts) -> bool:
    """What fails before the process group is made, no setting of NCCL can cure."""
    return any(step.name == "process-group" for rank in facts.ranks for step in rank.steps)


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
