"""Host memory that really runs out: runs of dsdoctor inside a control group that the test makes.

The launcher is one of some lines, so that what fills the group is the script alone; its ranks are the real child.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from dsdoctor.blame.verdict import decide
from dsdoctor.case import Case
from dsdoctor.diagnoses import diagnose
from dsdoctor.runs.facts import Run
from dsdoctor.runs.leftovers import marked_pids
from dsdoctor.stages.legs import summary
from tests.runs.child_run import REPOSITORY, write_script
from tests.runs.memory_group import memory_group

LIMIT = 700 << 20

IN_THE_GROUP = """
import os, sys
group, folder, script, watched = sys.argv[1:]
with open(os.path.join(group, "cgroup.procs"), "w") as procs:
    procs.write(str(os.getpid()))
from pydantic import TypeAdapter
from dsdoctor.runs import hostmemory, launcher, supervise
from dsdoctor.runs.facts import Run
from dsdoctor.runs.spec import RunSpec
from tests.runs import small_launcher
launcher._torchrun = small_launcher.line
if watched == "no":  # then only the kernel acts
    hostmemory._RESERVE_SHARE = hostmemory._RESERVE_LEAST = 0
cwd = os.path.dirname(script)
spec = RunSpec(script=script, cwd=cwd, folder=folder, config={})
plan = launcher.LaunchPlan(nproc=2, device="cpu")
run = supervise.supervise(spec, plan, supervise.Limits(timeout=60), "with-deepspeed")
sys.stdout.buffer.write(TypeAdapter(Run).dump_json(run))
"""

GROWS = """
    import os, time

    def fill():
        held = []
        while os.environ["RANK"] == "1":
            held.append(bytearray(os.urandom(1)) * (8 << 20))
            time.sleep({pause})

    fill()
    time.sleep(60)
    """
KILLS_ITSELF = """
    import os, signal, time
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
    """


def run_in_group(tmp_path: Path, text: str, *, watched: bool = True) -> Run:
    script = write_script(tmp_path, text)
    folder = tmp_path / "run"
    with memory_group(LIMIT) as group:
        arguments = [str(group), str(folder), str(script), "yes" if watched else "no"]
        done = subprocess.run(
            [sys.executable, "-c", IN_THE_GROUP, *arguments],
            env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
            capture_output=True,
            timeout=120,
            check=True,
        )
    assert marked_pids(folder) == set()
    return TypeAdapter(Run).validate_json(done.stdout)


def found(run: Run) -> dict[str, str]:
    return {finding.id: finding.cause for finding in diagnose(Case(runs=(run,))).findings}


def test_run_is_stopped_before_the_kernel_has_to_kill(tmp_path: Path) -> None:
    run = run_in_group(tmp_path, GROWS.format(pause=0.1))

    assert (run.outcome, run.oom_kills) == ("out-of-memory", 0)
    assert [rank.ended_by_us for rank in run.ranks] == [True, True]
    left = [sample.available_bytes for sample in run.memory]
    assert left[0] > left[-1]
    assert max(sample.ranks_bytes for sample in run.memory) > LIMIT / 2
    assert run.ranks[1].stack[-1].function == "fill", "where the memory went"
    findings = diagnose(Case(runs=(run,))).findings
    assert [finding.id for finding in findings] == ["memory/host-oom-kill"]
    assert "host memory left: " in findings[0].evidence[0].text
    assert decide(Case(runs=(run,)), findings).blame == "environment"
    last = run.memory[-1]
    assert summary(run)["host_memory"][-1] == [round(last.seconds, 2), last.ranks_bytes, last.available_bytes]


def test_kill_by_the_kernel_is_proved_by_its_counter(tmp_path: Path) -> None:
    run = run_in_group(tmp_path, GROWS.format(pause=0), watched=False)

    assert (run.outcome, run.ranks[1].exit_code) == ("killed", -9)
    assert run.oom_kills >= 1
    assert set(found(run)) & {"memory/host-oom-kill", "launch/killed"} == {"memory/host-oom-kill"}
    if run.kernel_kills:
        assert run.ranks[1].pid in {kill.pid for kill in run.kernel_kills}


def test_kill_by_a_person_is_told_from_it(tmp_path: Path) -> None:
    run = run_in_group(tmp_path, KILLS_ITSELF)

    assert (run.outcome, run.ranks[1].exit_code, run.oom_kills, run.kernel_kills) == ("killed", -9, 0, ())
    assert set(found(run)) & {"memory/host-oom-kill", "launch/killed"} == {"launch/killed"}


@pytest.fixture(autouse=True)
def _no_kernel_without_linux() -> None:
    if sys.platform != "linux":
        pytest.skip("control groups are Linux's")
