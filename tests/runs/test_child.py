"""A script in the child process is a program like any other: plain Python, no DeepSpeed needed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dsdoctor.runs.spec import STACK_SIGNAL, stack_path
from dsdoctor.runs.trace import read_trace
from tests.runs.child_run import ChildRun, child_command, run_child, write_script


@pytest.fixture
def work(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    return folder


def run(work: Path, text: str, **order: object) -> ChildRun:
    write_script(work, text)
    return run_child(work, **order)


def test_script_finds_what_python_would_give_it(work: Path) -> None:
    write_script(work, "VALUE = 7\n", name="code/neighbour.py")
    write_script(
        work,
        """
        from __future__ import annotations
        import os, pickle, sys, typing
        from dataclasses import dataclass
        from neighbour import VALUE

        @dataclass
        class Options:
            name: str = "x"

        assert "torch" not in sys.modules and "numpy" not in sys.modules, "the script must import them first"
        assert __name__ == "__main__" and VALUE == 7
        assert __file__ == os.path.join(os.getcwd(), "code", "train.py"), __file__
        assert sys.argv == ["code/train.py", "--a", "1"], sys.argv
        assert sys.path[0] == os.path.dirname(os.path.realpath(__file__)), sys.path
        assert typing.get_type_hints(Options) == {"name": str}
        assert pickle.loads(pickle.dumps(Options("y"))) == Options("y")
        if __name__ == "__main__":
            print("all there")
        """,
        name="code/train.py",
    )
    result = run_child(work, script="code/train.py", args=("--a", "1"))
    assert result.stderr() == ""
    assert result.stdout() == "all there\n"
    assert result.codes == (0,)
    assert (result.trace.finish_code, result.trace.completed, result.trace.failure) == (0, True, None)


def test_module_of_a_package(work: Path) -> None:
    write_script(work, "", name="pkg/__init__.py")
    write_script(work, "NAME = 'helper'\n", name="pkg/helper.py")
    write_script(
        work,
        """
        import sys
        from .helper import NAME
        print(__name__, __package__, NAME, sys.argv[1:], sys.modules["__main__"].__spec__.name)
        """,
        name="pkg/train.py",
    )
    result = run_child(work, script="pkg.train", as_module=True, args=("x",))
    assert result.stdout() == "__main__ pkg helper ['x'] pkg.train\n"


def test_missing_module_fails_as_python_says_it(work: Path) -> None:
    result = run_child(work, script="no_such_module", as_module=True)
    assert result.codes == (1,)
    assert result.trace.failure is not None
    assert result.trace.failure.type == "ModuleNotFoundError"
    assert "no_such_module" in result.trace.failure.message


def test_arguments_of_the_launcher_come_before_the_scripts(work: Path) -> None:
    write_script(work, "import sys; print(sys.argv[1:])")
    result = run_child(work, launcher_arguments=["--local_rank=0"], args=("--lr", "1"))
    assert result.stdout() == "['--local_rank=0', '--lr', '1']\n"


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("sys.exit()", 0),
        ("sys.exit(3)", 3),
        ("sys.exit('no luck')", 1),
        ("argparse.ArgumentParser().parse_args(['--unknown'])", 2),
        ("threading.Thread(target=lambda: time.sleep(0.2)).start()", 0),
    ],
)
def test_exit_codes(work: Path, ending: str, code: int) -> None:
    result = run(work, f"import argparse, sys, threading, time\n{ending}\n")
    assert result.codes == (code,)
    assert (result.trace.finish_code, result.trace.completed) == (code, code == 0)
    assert result.trace.failure is None
    if "luck" in ending:
        assert result.stderr() == "no luck\n"


def test_exception_with_its_frames_and_its_cause(work: Path) -> None:
    result = run(
        work,
        """
        class Broken(Exception):
            pass

        def look(table):
            try:
                return table["x"]
            except KeyError as error:
                raise Broken("no such row") from error

        look({})
        """,
    )
    failure = result.trace.failure
    assert failure is not None
    assert (failure.rank, failure.type, failure.message) == (0, "Broken", "no such row")
    script = str(work / "train.py")
    assert [(f.file, f.line, f.function) for f in failure.frames] == [(script, 11, "<module>"), (script, 9, "look")]
    assert failure.frames[0].text == "look({})"
    assert [(link.type, link.message) for link in failure.chain] == [("KeyError", "'x'")]
    assert result.codes == (1,)
    assert result.trace.finish_code is None
    assert result.stderr().startswith("Traceback (most recent call last):\n")
    assert result.stderr().endswith("Broken: no such row\n")
    assert "dsdoctor" not in result.stderr().replace(str(work), "")


def test_syntax_error_points_at_the_line(work: Path) -> None:
    result = run(work, "x = 1\nif x\n    pass\n")
    failure = result.trace.failure
    assert failure is not None
    assert failure.type == "SyntaxError"
    assert (failure.frames[-1].file, failure.frames[-1].line) == (str(work / "train.py"), 2)


def test_missing_script_is_a_failure_of_the_run(work: Path) -> None:
    result = run_child(work)
    assert result.codes == (1,)
    assert result.trace.failure is not None
    assert result.trace.failure.type == "FileNotFoundError"


def test_exit_handlers_run_and_output_is_kept_in_order(work: Path) -> None:
    result = run(
        work,
        """
        import atexit, os, sys
        atexit.register(lambda: print("handler"))
        os.system("echo from a child")
        print("script")
        print("oops", file=sys.stderr)
        """,
    )
    assert result.stdout() == "from a child\nscript\nhandler\n"
    assert result.stderr() == "oops\n"


def test_forked_process_does_not_speak_for_the_rank(work: Path) -> None:
    result = run(
        work,
        """
        import os, sys
        if os.fork() == 0:
            sys.exit(5)
        assert os.wait()[1] >> 8 == 5
        """,
    )
    assert result.codes == (0,)
    assert result.trace.finish_code == 0


def test_seed_reaches_every_generator_and_the_scripts_own_wins(work: Path) -> None:
    text = """
        import random, numpy, torch
        print(random.random(), numpy.random.rand(), torch.rand(1).item())
        torch.manual_seed(1)
        print(torch.rand(1).item())
        """
    first, again, other = (run(work, text, seed=seed).stdout().splitlines() for seed in (5, 5, 6))
    assert first == again
    assert all(a != b for a, b in zip(first[0].split(), other[0].split(), strict=True))
    assert first[1] == other[1]


def test_spawned_data_workers_find_the_dataset_of_the_script(work: Path) -> None:
    result = run(
        work,
        """
        import torch
        from torch.utils.data import DataLoader, Dataset

        class Rows(Dataset):
            def __len__(self):
                return 4
            def __getitem__(self, i):
                return torch.tensor(i)

        if __name__ == "__main__":
            loader = DataLoader(Rows(), num_workers=1, multiprocessing_context="spawn")
            print([int(row) for row in loader])
        """,
    )
    assert result.stderr() == ""
    assert result.stdout() == "[0, 1, 2, 3]\n"


def test_stacks_on_demand_show_where_the_script_waits(work: Path) -> None:
    write_script(work, "import time\n\ndef wait():\n    time.sleep(60)\n\nprint('here')\nwait()\n")
    command, environment = child_command(work)
    process = subprocess.Popen(command, env=environment, cwd=work)
    folder = work.parent / "work-run"
    output = folder / "stdout-rank0.txt"
    try:
        wait_for(lambda: output.exists() and output.read_text() == "here\n")
        os.kill(process.pid, STACK_SIGNAL)
        wait_for(lambda: "wait" in stack_path(folder, 0).read_text())
        assert f'File "{work / "train.py"}", line 4 in wait' in stack_path(folder, 0).read_text()
        assert process.poll() is None, "asking for stacks must not end the rank"
    finally:
        process.kill()
        process.wait()


def test_rank_dies_with_its_parent(work: Path) -> None:
    write_script(work, "import time\nprint('here')\ntime.sleep(60)\n")
    command, environment = child_command(work)
    code = "import subprocess, sys, time; subprocess.Popen(sys.argv[1:]); time.sleep(60)"
    parent = subprocess.Popen([sys.executable, "-c", code, *command], env=environment, cwd=work)
    output = work.parent / "work-run" / "stdout-rank0.txt"
    try:
        wait_for(lambda: output.exists() and output.read_text() == "here\n")
    finally:
        parent.kill()
        parent.wait()
    pid = read_trace(output.parent, 0).pid
    assert pid is not None
    wait_for(lambda: not is_running(pid))


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def wait_for(condition: Callable[[], bool], seconds: float = 30) -> None:
    """Wait until `condition()` holds; the limit only bounds a failing test."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError("waited in vain")
