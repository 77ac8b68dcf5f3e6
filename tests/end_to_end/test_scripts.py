"""What scripts do besides training: the ways to start them, files beside them, workers, and mistakes of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dsdoctor.runs.leftovers import marked_pids
from tests.end_to_end.command import Document, call, ids, left_over, stage, steps
from tests.end_to_end.test_styles import BF16
from tests.runs.child_run import write_script

pytestmark = pytest.mark.full

TRAIN = """
    import argparse, os, sys
    import deepspeed
    import torch
    {imports}

    def main():
        {before}
        parser = argparse.ArgumentParser()
        parser.add_argument("--local_rank", type=int, default=-1)
        parser.add_argument("--lr", type=float, required=True)
        args = parser.parse_args()
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 1)
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config={{}})
        for batch in {batches}:
            {steps}
        {after}

    if __name__ == "__main__":
        main()
    """
RIGHT = "loss = engine(batch.bfloat16()).float().pow(2).mean(); engine.backward(loss); engine.step()"
RANDOM = "(torch.randn(4, 8) for _ in range(40))"


def train(work: Path, name: str = "train.py", **parts: str) -> None:
    usual = {"imports": "", "before": "pass", "batches": RANDOM, "steps": RIGHT, "after": "pass"}
    write_script(work, TRAIN.format(**{**usual, **parts}), name)
    (work / "ds_config.json").write_text(json.dumps(BF16))


def examine(
    work: Path, *options: str, script: str = "train.py", script_args: tuple[str, ...] = ("--lr", "1")
) -> Document:
    arguments = ["triage", "ds_config.json", script, "--nproc", "2", "--steps", "4", *options]
    arguments += ["--stages", "memory,with-deepspeed,without-deepspeed"]
    return call(arguments, work, *script_args)[1]


def healthy(document: Document) -> bool:
    assert document["verdict"]["blame"] == "healthy", document
    return (steps(document, "with-deepspeed"), steps(document, "without-deepspeed")) == (4, 4)


def test_module_of_a_package_with_relative_imports(tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").touch()
    write_script(tmp_path, "import torch\nBATCHES = [torch.ones(4, 8)] * 30\n", "pkg/data.py")
    train(tmp_path, "pkg/train.py", imports="from .data import BATCHES", batches="BATCHES")
    assert healthy(examine(tmp_path, "--module", script="pkg.train"))


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_that_load_data(tmp_path: Path, context: str) -> None:
    write_script(
        tmp_path,
        """
        import torch
        class Rows(torch.utils.data.Dataset):
            def __len__(self):
                return 400
            def __getitem__(self, index):
                return torch.randn(8, generator=torch.Generator().manual_seed(index))
        """,
        "rows.py",
    )
    loader = f"torch.utils.data.DataLoader(Rows(), 4, num_workers=2, multiprocessing_context={context!r})"
    train(tmp_path, imports="from rows import Rows", batches=loader)
    assert healthy(examine(tmp_path))


def test_script_with_habits_of_its_own(tmp_path: Path) -> None:
    """Another folder, own hooks and handlers, own time limit of the process group, its end by hand."""
    before = (
        "import atexit, datetime, signal; os.makedirs('elsewhere', exist_ok=True); os.chdir('elsewhere'); "
        "sys.excepthook = lambda *what: None; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); "
        "atexit.register(print, 'bye'); deepspeed.init_distributed(timeout=datetime.timedelta(minutes=3))"
    )
    after = "torch.distributed.barrier(); torch.distributed.destroy_process_group(); sys.exit(0)"
    train(tmp_path, before=before, after=after, batches="(torch.randn(4, 8) for _ in range(4))")
    assert healthy(examine(tmp_path))


def test_question_to_a_person(tmp_path: Path) -> None:
    train(tmp_path, before="input('which data? ')")
    document = examine(tmp_path)
    assert document["verdict"]["blame"] == "script"
    first = document["findings"][0]
    assert (first["id"], bool(first["caveat"])) == ("script/reads-input", True)


@pytest.mark.parametrize("stage_of_zero", [1, 3])
def test_step_before_backward(tmp_path: Path, stage_of_zero: int) -> None:
    wrong = "loss = engine(batch.bfloat16()).float().pow(2).mean(); engine.step(); engine.backward(loss)"
    train(tmp_path, steps=wrong)
    (tmp_path / "ds_config.json").write_text(json.dumps({**BF16, "zero_optimization": {"stage": stage_of_zero}}))
    document = examine(tmp_path)
    assert document["verdict"]["blame"] == "script", document
    assert document["findings"][0]["id"] == "script/step-before-backward"


def test_arguments_that_the_script_does_not_know(tmp_path: Path) -> None:
    train(tmp_path)
    document = examine(tmp_path, script_args=("--rate", "1"))
    assert document["verdict"]["blame"] in ("script", "inconclusive")
    assert "script/exited" in ids(document, "error")
    assert "the following arguments are required: --lr" in stage(document, "with-deepspeed")["why"]


def test_bad_loss_of_a_second_engine(tmp_path: Path) -> None:
    """A reference model that never trains is built first; what goes wrong is the critic, not the actor."""
    write_script(
        tmp_path,
        """
        import deepspeed
        import torch

        torch.manual_seed(0)
        models = [torch.nn.Linear(8, 1) for _ in range(3)]
        reference, actor, critic = (
            deepspeed.initialize(model=model, model_parameters=model.parameters(), config={})[0] for model in models
        )
        for step in range(40):
            x = torch.randn(4, 8).bfloat16()
            with torch.no_grad():
                target = reference(x).float()
            actor.backward((actor(x).float() - target).square().mean())
            actor.step()
            critic.backward(critic(x).float().square().mean() / (0 if step == 2 else 1))
            critic.step()
        """,
    )
    (tmp_path / "ds_config.json").write_text(json.dumps(BF16))
    document = examine(tmp_path, script_args=())
    assert steps(document, "with-deepspeed") == 4
    assert "the loss of another engine is" in stage(document, "without-deepspeed")["why"]
    assert document["verdict"]["blame"] != "healthy"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_end_of_the_command_ends_workers_and_daemons(tmp_path: Path, number: signal.Signals) -> None:
    """Persistent workers of a data loader, and a daemon that left its session, while dsdoctor is ended."""
    daemon = "os.fork() or (os.setsid(), os.fork() or os.execvp('sleep', ['sleep', '900']), os._exit(0))"
    loader = "torch.utils.data.DataLoader(torch.randn(4000, 8), 4, num_workers=2, persistent_workers=True)"
    wait = "__import__('time').sleep(0.2); " + RIGHT + "; print('trained', flush=True)"
    train(tmp_path, before=daemon, batches=loader, steps=wait)
    command = [sys.executable, "-m", "dsdoctor", "triage", "ds_config.json", "train.py", "--nproc", "2"]
    command += ["--stages", "with-deepspeed", "--steps", "5000", "--", "--lr", "1"]
    shared = set(os.listdir("/dev/shm"))
    dsdoctor = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    run = tmp_path / "dsdoctor-report/0001/with-deepspeed"
    try:
        wait_until(lambda: (run / "stdout-rank1.txt").exists() and "trained" in (run / "stdout-rank1.txt").read_text())
        assert len(marked_pids(run)) >= 11  # launcher, attendants, ranks, two workers and a daemon of each
        dsdoctor.send_signal(number)
        assert dsdoctor.wait(120) == (3 if number == signal.SIGINT else -number)
        wait_until(lambda: not marked_pids(run) and not left_over(tmp_path))
        wait_until(lambda: not {name for name in set(os.listdir("/dev/shm")) - shared if name.startswith("torch_")})
    finally:
        dsdoctor.kill()
        dsdoctor.wait()
        for pid in marked_pids(run):
            os.kill(pid, signal.SIGKILL)


def wait_until(condition, seconds: float = 240) -> None:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.1)
