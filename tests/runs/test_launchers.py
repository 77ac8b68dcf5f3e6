"""Launchers that really start ranks: deepspeed's on one and on "several" hosts, and a stand-in for srun.

The commands that reach other machines are stand-ins (`commands/`) that stay on this one; the ranks are `fake_rank`.
"""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from dsdoctor.runs import stacks, supervise
from dsdoctor.runs.facts import Run
from dsdoctor.runs.launcher import LaunchPlan
from dsdoctor.runs.leftovers import marked_pids
from dsdoctor.runs.spec import RunSpec
from dsdoctor.runs.supervise import Limits
from tests.runs.limits import count_from_the_begin

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "CHILD", "fake_rank")
    monkeypatch.setattr(stacks, "_ANSWER_SECONDS", 60)
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    monkeypatch.setenv("PATH", f"{HERE / 'commands'}{os.pathsep}{os.environ['PATH']}")


def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plan: LaunchPlan, *todo: str, stall: float = 60) -> Run:
    folder = tmp_path / "run"
    ranks = {str(rank): what for rank, what in enumerate(todo)}
    spec = RunSpec(script="x.py", cwd=str(tmp_path), folder=str(folder), config={}, steps=1, extra={"ranks": ranks})
    count_from_the_begin(monkeypatch, folder, len(todo))
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    result = supervise.supervise(spec, plan, Limits(timeout=120, stall=stall), "with-deepspeed")
    assert marked_pids(folder) == set()
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before
    return result


SLURM = LaunchPlan(nproc=3, launcher="slurm")


def test_tasks_of_srun_are_the_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(tmp_path, monkeypatch, SLURM, "stop", "stop", "stop")
    assert (result.outcome, result.world_size, [rank.exit_code for rank in result.ranks]) == ("stopped", 3, [0, 0, 0])


def test_task_that_fails_is_told_from_those_that_slurm_cancels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(tmp_path, monkeypatch, SLURM, "hang", "raise", "hang")
    assert (result.outcome, result.why) == ("raised", "rank 1 raised KeyError: 'weight'")
    assert [rank.ended_by_us for rank in result.ranks] == [True, False, True]


@pytest.mark.full
def test_hang_under_srun_ends_with_the_stacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(tmp_path, monkeypatch, SLURM, "finish", "hang-deaf", "finish", stall=2)
    assert (result.outcome, [rank.completed for rank in result.ranks]) == ("hung", [True, False, True])
    assert result.ranks[1].stack[-1].function == "wait_for_the_others"


def hostfile(tmp_path: Path, *hosts: str) -> str:
    path = tmp_path / "hostfile"
    path.write_text("".join(f"{host} slots=2\n" for host in hosts))
    return str(path)


@pytest.mark.full
def test_hostfile_with_this_host_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = LaunchPlan(nproc=2, launcher="deepspeed", hostfile=hostfile(tmp_path, "localhost"))
    result = run(tmp_path, monkeypatch, plan, "hang", "sigkill")
    assert (result.outcome, result.why) == ("killed", "rank 1 was ended by signal 9 (SIGKILL)")


@pytest.mark.full
def test_two_hosts_of_a_hostfile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks over a login that forgets the environment get what dsdoctor sets, and are told apart."""
    monkeypatch.setenv("WANDB_MODE", "online")
    plan = LaunchPlan(nproc=2, launcher="deepspeed", device="cpu", hostfile=hostfile(tmp_path, "node-a", "node-b"))
    result = run(tmp_path, monkeypatch, plan, "stop", "print-environment", "stop", "stop")
    assert (result.outcome, result.world_size) == ("stopped", 4)
    printed = dict(line.split("=", 1) for line in (tmp_path / "run/stdout-rank1.txt").read_text().splitlines())
    assert (printed["WANDB_MODE"], printed["DS_ACCELERATOR"]) == ("offline", "cpu")
    assert printed["DSDOCTOR_RUN"] == str(tmp_path / "run")


@pytest.mark.full
def test_rank_on_another_host_that_hangs_and_is_deaf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = LaunchPlan(nproc=2, launcher="deepspeed", device="cpu", hostfile=hostfile(tmp_path, "node-a", "node-b"))
    result = run(tmp_path, monkeypatch, plan, "finish", "finish", "finish", "hang-deaf", stall=2)
    assert result.outcome == "hung"
    assert "killed by name" not in (tmp_path / "run" / "launcher.txt").read_text(), "other jobs run on these hosts, too"
    assert result.ranks[3].stack[-1].function == "wait_for_the_others"
