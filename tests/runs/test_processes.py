"""Bounded runs of a module on every rank, with a small launcher in the place of torchrun."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from dsdoctor.runs import launcher, processes
from dsdoctor.runs.launcher import LaunchPlan
from dsdoctor.runs.leftovers import marked_pids
from dsdoctor.runs.processes import Processes, run_bounded
from tests.runs import small_launcher


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing of torch in here, so that a start takes a moment only. Ranks find modules in `tmp_path`."""

    monkeypatch.setattr(launcher, "_torchrun", small_launcher.line)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def module(folder: Path, text: str) -> str:
    (folder / "on_the_rank.py").write_text(text)
    return "on_the_rank"


def test_exit_codes_of_the_ranks_are_known(tmp_path: Path) -> None:
    text = """
import os, signal, time
if os.environ["RANK"] == "1":
    while '"end"' not in open(os.path.join(os.environ["DSDOCTOR_RUN"], "process-rank0.jsonl")).read():
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGBUS)
"""
    name = module(tmp_path, text)

    done = run_bounded(LaunchPlan(nproc=2), name, [], folder=tmp_path, cwd=tmp_path, timeout=30)

    assert (done.exit_code, done.timed_out) == (signal.SIGBUS, False)
    assert [rank.exit_code for rank in done.ranks] == [0, -signal.SIGBUS]
    assert not any(rank.told for rank in done.ranks)


def test_module_gets_its_arguments_the_place_and_the_output_is_kept(tmp_path: Path) -> None:
    name = module(tmp_path, "import os, sys\nprint('got', sys.argv[1:], os.getcwd(), os.environ['DSDOCTOR_RUN'])\n")

    run_bounded(LaunchPlan(nproc=1), name, ["a b", "--c"], folder=tmp_path, cwd="/", timeout=30)

    assert (tmp_path / "launcher.txt").read_text() == f"got ['a b', '--c'] / {tmp_path}\n"


def test_local_rank_of_the_deepspeed_launcher_reaches_the_module_in_front(tmp_path: Path) -> None:
    name = module(tmp_path, "import sys\nprint(sys.argv[1:])\n")
    line = [sys.executable, "-m", processes.ATTENDANT, "--local_rank=1", str(tmp_path), name, "spec.json"]

    done = subprocess.run(line, capture_output=True, text=True, check=True, timeout=30)

    assert done.stdout == "['--local_rank=1', 'spec.json']\n"


def test_time_limit_ends_the_run(tmp_path: Path) -> None:
    name = module(tmp_path, "import time\ntime.sleep(600)\n")

    done = run_bounded(LaunchPlan(nproc=2), name, [], folder=tmp_path, cwd=tmp_path, timeout=1)

    assert (done.exit_code, done.timed_out) == (None, True)
    assert done.seconds < 30
    assert marked_pids(tmp_path) == set()


def test_port_of_the_user_is_kept_and_else_chosen(tmp_path: Path) -> None:
    name = module(tmp_path, "")
    chosen = run_bounded(LaunchPlan(nproc=1), name, [], folder=tmp_path, cwd=tmp_path, timeout=30).port
    assert launcher.port_is_free("127.0.0.1", chosen)

    plan = LaunchPlan(nproc=1, master_port=29511)
    assert run_bounded(plan, name, [], folder=tmp_path, cwd=tmp_path, timeout=30).port == 29511


def test_exception_in_the_block_ends_everything(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), Processes(tmp_path) as running:  # noqa: PT012
        running.start(["sleep", "600"], os.environ, tmp_path, tmp_path / "launcher.txt")
        pids = [member.pid for member in running.members()]
        assert len(pids) == 1
        raise ZeroDivisionError

    assert not psutil.pid_exists(pids[0])


def test_processes_of_others_are_left_alone(tmp_path: Path) -> None:
    other = subprocess.Popen(["sleep", "600"])
    try:
        with Processes(tmp_path) as running:
            running.start(["sleep", "600"], os.environ, tmp_path, tmp_path / "launcher.txt")
            assert other.pid not in {member.pid for member in running.members()}
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_interrupt_while_ending_ends_the_patience_and_is_not_lost(tmp_path: Path) -> None:
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf'); time.sleep(600)"
    output = tmp_path / "launcher.txt"
    running = Processes(tmp_path)
    with pytest.raises(KeyboardInterrupt), running:  # noqa: PT012
        running.start([sys.executable, "-u", "-c", deaf], os.environ, tmp_path, output)
        while "deaf" not in output.read_text():
            time.sleep(0.02)
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        running.end(grace=600)

    assert running.poll() == -signal.SIGKILL


def test_ranks_notice_that_dsdoctor_is_gone_where_the_launcher_lives_on(tmp_path: Path) -> None:
    """As with launchers of two halves, and on other nodes: only the lock tells."""
    name = module(tmp_path, "import time\ntime.sleep(600)\n")
    (tmp_path / "alive.lock").touch()  # nobody holds it
    line = [sys.executable, "-m", processes.ATTENDANT, str(tmp_path), name]

    attendant = subprocess.run(line, timeout=30, check=False)

    assert attendant.returncode == -signal.SIGKILL
    assert marked_pids(tmp_path) == set()


def test_command_that_does_not_exist_says_so(tmp_path: Path) -> None:
    output = tmp_path / "launcher.txt"
    with Processes(tmp_path) as running:
        running.start(["no-such-launcher"], os.environ, tmp_path, output)
        while running.poll() is None:
            time.sleep(0.02)
    assert output.read_text() == "cannot start no-such-launcher: No such file or directory\n"


def test_no_port_stays_bound(tmp_path: Path) -> None:
    text = (
        "import os, socket, time\ns = socket.create_server(('127.0.0.1', int(os.environ['PORT'])))\ntime.sleep(600)\n"
    )
    name = module(tmp_path, text)
    port = launcher.free_port()
    os.environ["PORT"] = str(port)
    try:
        run_bounded(LaunchPlan(nproc=1), name, [], folder=tmp_path, cwd=tmp_path, timeout=1)
    finally:
        del os.environ["PORT"]

    with socket.socket() as probe:  # without SO_REUSEADDR: a listener would be found
        probe.bind(("127.0.0.1", port))
