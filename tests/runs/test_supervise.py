"""Real processes through the real launcher, with ranks that behave as told (`fake_rank`) instead of a script."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from dsdoctor.blame.health import judge
from dsdoctor.runs import extensions, launcher, stacks, supervise
from dsdoctor.runs.facts import Run
from dsdoctor.runs.launcher import LaunchPlan
from dsdoctor.runs.leftovers import marked_pids
from dsdoctor.runs.spec import RunSpec, trace_path
from dsdoctor.runs.supervise import Limits
from tests.runs.limits import count_from_the_begin

HERE = Path(__file__).parent
RunRanks = Callable[..., Run]


def order(folder: Path, ranks: dict[str, str]) -> RunSpec:
    return RunSpec(
        script="x.py", cwd=str(folder.parent), folder=str(folder), config={}, steps=1, extra={"ranks": ranks}
    )


@pytest.fixture
def run_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunRanks:
    """Run ranks that do what the arguments say, by number; checks that nothing of them is left."""
    monkeypatch.setattr(supervise, "CHILD", "fake_rank")
    monkeypatch.setattr(stacks, "_ANSWER_SECONDS", 60)
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    folder = tmp_path / "run"

    def run(*todo: str, launcher: str = "torchrun", stall: float = 60, timeout: float = 60) -> Run:
        plan = LaunchPlan(nproc=len(todo), device="cpu", launcher=launcher)  # type: ignore[arg-type]
        silent = [rank for rank, what in enumerate(todo) if what == "hang-before-start"]
        count_from_the_begin(monkeypatch, folder, len(todo), never_begin=silent)
        spec = order(folder, {str(rank): what for rank, what in enumerate(todo)})
        result = supervise.supervise(spec, plan, Limits(timeout=timeout, stall=stall), "with-deepspeed")
        assert marked_pids(folder) == set()
        return result

    return run


def test_ranks_that_reach_the_last_step_stop(run_ranks: RunRanks) -> None:
    run = run_ranks("stop", "stop")

    assert (run.outcome, run.launcher_exit, run.why) == ("stopped", 0, "")
    assert [(rank.exit_code, rank.completed, rank.ended_by_us) for rank in run.ranks] == [(0, True, False)] * 2
    assert [rank.steps[0].losses for rank in run.ranks] == [(1.5,)] * 2
    assert run.memory[0].available_bytes > 0
    assert max(sample.ranks_bytes for sample in run.memory) > 20_000_000  # torchrun itself imports torch


def test_exception_on_one_rank_is_the_outcome_and_its_peer_a_victim(run_ranks: RunRanks) -> None:
    run = run_ranks("hang", "raise")

    assert run.outcome == "raised"
    assert run.why == "rank 1 raised KeyError: 'weight'"
    victim, culprit = run.ranks
    assert (culprit.exit_code, culprit.ended_by_us) == (1, False)
    assert (victim.exit_code, victim.ended_by_us) == (-signal.SIGTERM, True)


def test_hang_on_one_rank_is_found_and_shown_by_its_stack(run_ranks: RunRanks) -> None:
    run = run_ranks("finish", "hang", stall=2)

    assert run.outcome == "hung"
    assert run.why == "no progress of any rank for 2 s: rank 1 in forward"
    assert run.ranks[0].completed
    hung = run.ranks[1]
    assert (hung.ended_by_us, hung.exit_code) == (True, None)
    innermost = hung.stack[-1]
    assert (Path(innermost.file).name, innermost.function) == ("fake_rank.py", "wait_for_the_others")
    assert innermost.text == "time.sleep(600)"
    assert not hung.moved


@pytest.mark.parametrize(("todo", "number"), [("sigkill", 9), ("segfault", 11), ("sigkill-group", 9)])
def test_rank_that_dies_by_a_signal_is_killed_and_its_peer_a_victim(
    run_ranks: RunRanks, todo: str, number: int
) -> None:
    run = run_ranks("hang", todo)

    assert run.outcome == "killed"
    assert run.why == f"rank 1 was ended by signal {number} ({signal.Signals(number).name})"
    assert [rank.exit_code for rank in run.ranks] == [-signal.SIGTERM, -number]
    assert [rank.ended_by_us for rank in run.ranks] == [True, False]
    assert run.oom_kills == 0


@pytest.mark.parametrize(
    ("todo", "code", "words"),
    [
        ("exit-3", 3, "; it printed last: train.py: error: no such option: --lr"),
        ("exit-for-its-loss", 1, "; it printed last: ERROR:root:giving up; {'loss': nan}"),
        ("exit-in-silence", 4, ""),
    ],
)
def test_exit_with_a_code_is_no_exception(run_ranks: RunRanks, todo: str, code: int, words: str) -> None:
    run = run_ranks(todo, "hang")

    assert (run.outcome, run.why) == ("exited", f"rank 0 ended with exit code {code}{words}")
    assert run.ranks[0].exit_code == code


def test_what_a_rank_printed_before_it_ended_itself_is_kept(run_ranks: RunRanks) -> None:
    run = run_ranks("exit-for-its-loss", "hang")

    last = ["ERROR:root:giving up", "Loss is nan, stopping training", "{'loss': nan}"]
    assert run.ranks[0].printed.splitlines() == last
    assert judge(run).why == "rank 0 stopped: Loss is nan, stopping training"


def test_abort_after_the_work_is_done_proves_nothing(run_ranks: RunRanks) -> None:
    run = run_ranks("stop-then-abort", "stop")

    assert run.outcome == "stopped"
    assert (run.ranks[0].exit_code, run.ranks[0].completed) == (-signal.SIGABRT, True)


def test_ranks_that_wait_for_an_op_that_another_run_builds_are_not_hung(
    run_ranks: RunRanks, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(extensions, "cache_folder", lambda device: tmp_path / "cache")
    (tmp_path / "cache" / "cpu_adam").mkdir(parents=True)
    lock = tmp_path / "cache" / "cpu_adam" / "lock"

    def build() -> None:
        wait_until(lambda: all(trace_path(tmp_path / "run", rank).exists() for rank in (0, 1)), 120)
        time.sleep(4)
        lock.unlink()

    with open(lock, "w"):
        builder = threading.Thread(target=build)
        builder.start()
        run = run_ranks("wait-for-a-build", "wait-for-a-build", stall=1)
        builder.join()

    assert (run.outcome, run.why) == ("finished", "")


def test_time_limit_ends_even_ranks_and_grandchildren_that_ignore_requests(run_ranks: RunRanks) -> None:
    run = run_ranks("hang-deaf", "hang-deaf", timeout=2)

    assert run.outcome == "timeout"
    assert all(rank.stack for rank in run.ranks)


def test_the_building_of_an_op_does_not_use_up_the_time_of_the_run(
    run_ranks: RunRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervise, "_compiling", lambda members: True)
    monkeypatch.setattr(supervise, "_BUILD_SECONDS", 3.0)

    run = run_ranks("hang", "hang", stall=1, timeout=2)

    assert run.outcome == "timeout"
    assert run.seconds > 5


def test_rank_that_never_begins_is_shown_as_such(run_ranks: RunRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "_START_SECONDS", 4.0)

    run = run_ranks("finish", "hang-before-start", stall=1)

    assert (run.outcome, run.ranks[1].last_phase, run.ranks[1].stack) == ("hung", "not started", ())
    assert run.why == "no progress of any rank for 4 s: rank 1 not started"  # the limit in force, not --stall


def test_stopped_process_is_told_from_one_that_waits(run_ranks: RunRanks) -> None:
    run = run_ranks("sigstop", stall=1)

    assert run.outcome == "hung"
    assert run.ranks[0].state == "T"


def test_daemon_of_a_script_does_not_outlive_the_run(run_ranks: RunRanks) -> None:
    before = {process.pid for process in psutil.Process().children(recursive=True)}

    run = run_ranks("orphan")

    assert run.outcome == "finished"
    assert {process.pid for process in psutil.Process().children(recursive=True)} <= before


def test_shared_memory_of_a_killed_rank_is_removed_and_no_other(run_ranks: RunRanks, tmp_path: Path) -> None:
    mine = Path("/dev/shm") / f"not-of-the-run-{os.getpid()}"
    mine.touch()
    try:
        run = run_ranks("shared-memory")
        name = (tmp_path / "run" / "segment.txt").read_text()
        assert run.extra["removed_shared_memory"] == [name]
        assert not (Path("/dev/shm") / name).exists()
        assert mine.exists()
    finally:
        mine.unlink()


def test_ranks_of_the_deepspeed_launcher_are_told_apart(run_ranks: RunRanks) -> None:
    """Its own last line names the last rank that was spawned, whichever died."""
    run = run_ranks("sigkill", "hang", launcher="deepspeed")

    assert (run.outcome, run.ranks[0].exit_code, run.ranks[1].ended_by_us) == ("killed", -9, True)


def test_launcher_that_is_not_there_is_a_result(run_ranks: RunRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")

    run = run_ranks("stop", launcher="slurm")

    assert run.outcome == "not-started"
    assert "cannot start srun: No such file or directory" in run.why


def test_child_that_cannot_be_imported_is_a_result(run_ranks: RunRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "CHILD", "no_such_module_anywhere")

    run = run_ranks("stop")

    assert run.outcome == "not-started"
    assert run.why.endswith("No module named no_such_module_anywhere")


def test_port_taken_between_choice_and_use_is_tried_again(run_ranks: RunRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    with socket.create_server(("", 0)) as taken:
        ports = [launcher.free_port(), taken.getsockname()[1]]
        monkeypatch.setattr(supervise, "free_port", ports.pop)
        run = run_ranks("stop")

    assert run.outcome == "stopped"
    assert ports == []


PARENT = """
import sys
from pathlib import Path
sys.path.insert(0, {here!r})
from test_supervise import order
from dsdoctor.runs import supervise
supervise.CHILD = "fake_rank"
plan = supervise.LaunchPlan(nproc=2, device="cpu")
spec = order(Path({folder!r}), {{"0": "shared-memory-and-hang", "1": "orphan-and-hang"}})
try:
    supervise.supervise(spec, plan, supervise.Limits(), "with-deepspeed")
except KeyboardInterrupt:
    sys.exit(3)
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 3), (signal.SIGTERM, 3), (signal.SIGKILL, -9)])
def test_end_of_dsdoctor_ends_every_process(tmp_path: Path, number: signal.Signals, code: int) -> None:
    folder = tmp_path / "run"
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parents[1])])}
    parent = subprocess.Popen([sys.executable, "-c", PARENT.format(here=str(HERE), folder=str(folder))], env=env)
    try:
        # launcher, two attendants, two ranks, a grandchild
        wait_until(lambda: len(marked_pids(folder)) >= 6 and left_behind(folder), 120)
        segment = Path("/dev/shm", (folder / "segment.txt").read_text())
        assert segment.exists()

        parent.send_signal(number)

        assert parent.wait(120) == code
        wait_until(lambda: not marked_pids(folder) and not segment.exists(), 120 if number == signal.SIGKILL else 0)
    finally:
        parent.kill()
        parent.wait()
        for pid in marked_pids(folder):
            os.kill(pid, signal.SIGKILL)


def left_behind(folder: Path) -> bool:
    """The ranks have done what they were told before they hang: they wrote so after that."""
    return all(path.exists() for path in (trace_path(folder, 0), trace_path(folder, 1))) and (
        '"backward"' in trace_path(folder, 0).read_text() and '"finish"' in trace_path(folder, 1).read_text()
    )


def wait_until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def test_script_of_a_user_under_the_real_child(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, sys, time\n"
        "print('hello from', os.environ['RANK'], sys.argv[1:])\n"
        "if os.environ['RANK'] == '1':\n"
        "    while not os.path.exists('said'): time.sleep(0.05)\n"
        "    raise ValueError('bad sample')\n"
        "open('said', 'w').close()\n"
        "time.sleep(600)\n"
    )
    folder = tmp_path / "run"
    spec = RunSpec(script=str(script), args=("--lr", "1"), cwd=str(tmp_path), folder=str(folder), config={})

    run = supervise.supervise(spec, LaunchPlan(nproc=2, device="cpu"), Limits(timeout=60), "probe")

    assert (run.outcome, run.why) == ("raised", "rank 1 raised ValueError: bad sample")
    failure = run.failures[0]
    assert (failure.rank, failure.frames[-1].line, failure.frames[-1].file) == (1, 5, str(script))
    assert run.ranks[0].ended_by_us
    assert (folder / "stdout-rank0.txt").read_text() == "hello from 0 ['--lr', '1']\n"
    assert marked_pids(folder) == set()
