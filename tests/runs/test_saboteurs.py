"""Scripts that do to their processes what scripts should not: each run ends in time, with a true result, and nothing
of it stays. No torch in any of them; the launcher is a small one, the ranks are the real child.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from dsdoctor.runs import launcher, output, supervise
from dsdoctor.runs.facts import Run
from dsdoctor.runs.launcher import LaunchPlan
from dsdoctor.runs.leftovers import marked_pids
from dsdoctor.runs.spec import RunSpec
from dsdoctor.runs.supervise import Limits
from tests.runs import small_launcher
from tests.runs.child_run import write_script
from tests.runs.limits import count_from_the_begin

RunScript = Callable[..., Run]


@pytest.fixture
def run_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunScript:
    """Run a text as the script of two ranks. The limits count from when both are there."""
    monkeypatch.setattr(launcher, "_torchrun", small_launcher.line)
    monkeypatch.setattr(supervise, "_SETTLE_SECONDS", 3.0)
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    work, folder = tmp_path / "work", tmp_path / "run"
    work.mkdir()

    def run(text: str, *, timeout: float = 60, stall: float = 60) -> Run:
        write_script(work, text)
        monkeypatch.setattr(supervise, "_START_SECONDS", stall)
        count_from_the_begin(monkeypatch, folder, 2)
        spec = RunSpec(script="train.py", cwd=str(work), folder=str(folder), config={})
        began = time.monotonic()
        result = supervise.supervise(
            spec, LaunchPlan(nproc=2, device="cpu"), Limits(timeout=timeout, stall=stall), "probe"
        )
        assert time.monotonic() - began < timeout + 60
        assert marked_pids(folder) == set()
        assert {child.pid for child in psutil.Process().children(recursive=True)} <= before
        return result

    return run


DAEMONS = """
    import os, time

    def daemon():
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                time.sleep(600)
            os._exit(0)

    for _ in range(10):
        daemon()
    """


def test_swarm_of_daemons_does_not_outlive_the_run(run_script: RunScript) -> None:
    run = run_script(DAEMONS)
    assert (run.outcome, run.why) == ("finished", "")


def test_daemons_of_a_rank_that_fails_go_too(run_script: RunScript) -> None:
    run = run_script(DAEMONS + "\n    raise ValueError('no data')\n")
    assert run.outcome == "raised"
    assert "ValueError: no data" in run.why


def test_processes_that_hide_their_environment_go_too(run_script: RunScript) -> None:
    run = run_script(
        """
        import subprocess, sys
        code = "import subprocess, sys; subprocess.Popen(['sleep', '600'], env={}, start_new_session=True)"
        subprocess.run([sys.executable, "-c", code], env={}, check=True)
        """
    )
    assert run.outcome == "finished"


def test_flood_of_output_is_bounded(run_script: RunScript, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "MOST_BYTES", 8 << 20)
    run = run_script(
        """
        import sys, time
        print("the beginning")
        for number in range(60):
            sys.stdout.write("x" * (1 << 20) + "\\n")
            time.sleep(0.05)
        print("the end")
        """
    )
    assert run.outcome == "finished"
    path = Path(run.folder) / "stdout-rank1.txt"
    assert path.stat().st_size < 40 << 20
    text = path.read_text()
    assert text.startswith("the beginning\n")
    assert text.endswith("the end\n")


def test_binary_output_and_a_closed_stdout(run_script: RunScript) -> None:
    run = run_script(
        """
        import os, sys
        sys.stdout.buffer.write(bytes(range(256)) * 100)
        sys.stdout.buffer.flush()
        os.write(2, b"\\xff\\xfe\\x00 last words \\x1b[31m\\n")
        os.close(1)
        os.close(0)
        sys.exit(5)
        """
    )
    assert run.outcome == "exited"
    assert "ended with exit code 5" in run.why


def test_other_program_in_the_place_of_the_script(run_script: RunScript) -> None:
    run = run_script("import os\nos.execvp('sh', ['sh', '-c', 'echo done; exit 3'])\n")
    assert run.outcome == "exited"
    assert run.why.startswith(("rank 0 ended with exit code 3", "rank 1 ended with exit code 3"))


def test_rank_that_kills_its_parent(run_script: RunScript) -> None:
    run = run_script(
        """
        import os, signal, time
        if os.environ["RANK"] == "1":
            os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(600)
        """
    )
    assert (run.outcome, run.why) == ("killed", "rank 1 was ended by signal 9 (SIGKILL)")


@pytest.mark.skipif(sys.platform != "linux", reason="sleep of the C library")
def test_hang_in_c_that_holds_pythons_lock_is_found_with_its_line(run_script: RunScript) -> None:
    run = run_script(
        """
        import ctypes, os, signal
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        print("here")
        if os.environ["RANK"] == "1":
            ctypes.PyDLL(None).sleep(600)
        """,
        stall=3,
    )
    assert run.outcome == "hung"
    assert run.ranks[0].completed
    assert run.ranks[1].stack[-1].text == "ctypes.PyDLL(None).sleep(600)"


def test_working_directory_that_the_script_deletes(run_script: RunScript) -> None:
    run = run_script(
        """
        import os, shutil
        here = os.getcwd()
        if os.environ["RANK"] == "0":
            shutil.rmtree(here)
        os.chdir("/")
        open(os.path.join(here, "data.txt"))
        """
    )
    assert run.outcome == "raised"
    assert "FileNotFoundError" in run.why


def test_own_hooks_and_handlers_of_a_script(run_script: RunScript) -> None:
    run = run_script(
        """
        import atexit, faulthandler, os, signal, sys, threading
        sys.excepthook = lambda *what: print("mine:", what[0].__name__)
        threading.excepthook = lambda what: None
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        faulthandler.disable()
        atexit.register(lambda: print("at exit"))
        raise LookupError("no shard")
        """
    )
    assert run.outcome == "raised"
    assert "LookupError: no shard" in run.why
    first = run.failures[0].rank
    assert (Path(run.folder) / f"stdout-rank{first}.txt").read_text() == "mine: LookupError\nat exit\n"


def test_script_that_asks_for_input(run_script: RunScript) -> None:
    run = run_script("name = input('your name? ')\n")
    assert run.outcome == "raised"
    assert "EOFError: EOF when reading a line" in run.why


def test_time_limit_holds_for_a_script_that_prints_for_ever(run_script: RunScript) -> None:
    run = run_script("import time\nwhile True:\n    print('still here')\n    time.sleep(0.05)\n", timeout=2, stall=2)
    assert run.outcome == "timeout"
    assert all(rank.stack for rank in run.ranks)
    assert run.why == "not done after 2 s, no optimizer step made: rank 0 in the script, rank 1 in the script"
    assert all(rank.quiet is not None and rank.quiet < run.stall_limit for rank in run.ranks)
    assert [rank.printed for rank in run.ranks] == ["still here"] * 2


def test_disk_that_the_script_fills(run_script: RunScript, tmp_path: Path) -> None:
    """The run's own folder is on that disk too, so that hardly anything can be written down."""
    (tmp_path / "run").mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path / "run")], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip("no small file system can be mounted here")
    try:
        run = run_script(
            """
            import os
            with open(os.path.join(os.environ["DSDOCTOR_RUN"], "data.bin"), "wb", buffering=0) as file:
                while True:
                    file.write(bytes(1024))
            """
        )
    finally:
        subprocess.run(["umount", str(tmp_path / "run")], check=True)
    assert run.outcome in ("raised", "exited")
    assert "No space left on device" in run.why
