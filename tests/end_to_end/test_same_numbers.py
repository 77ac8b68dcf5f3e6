"""The observed numbers are the user's: what chance decides, and the losses, with dsdoctor, without it, in both legs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dsdoctor.runs.extensions import VARIABLE, cache_folder
from dsdoctor.runs.launcher import LaunchPlan, free_port
from dsdoctor.runs.spec import RunSpec
from dsdoctor.runs.supervise import Limits, supervise
from tests.end_to_end.test_styles import ADAM, STYLES

pytestmark = pytest.mark.full


def drawn(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("drawn ")]


@pytest.mark.parametrize("stage", [0, 2])
def test_samples_dropout_and_losses_are_those_of_the_bare_script(tmp_path: Path, stage: int) -> None:
    config = {"train_micro_batch_size_per_gpu": 4, "optimizer": ADAM, "zero_optimization": {"stage": stage}}
    shutil.copy(STYLES / "sampled.py", tmp_path / "train.py")
    (tmp_path / "ds_config.json").write_text(json.dumps(config))
    bare = run_bare(tmp_path)
    legs = {}
    for engine in ("deepspeed", "plain"):
        folder = tmp_path / engine
        spec = RunSpec(script="train.py", cwd=str(tmp_path), folder=str(folder), config=config, engine=engine, steps=10)
        run = supervise(spec, LaunchPlan(nproc=2, device="cpu"), Limits(), "with-deepspeed")
        assert run.outcome == "stopped", run.why
        legs[engine] = [drawn((folder / f"stdout-rank{rank}.txt").read_text()) for rank in (0, 1)]

    for rank in (0, 1):
        # the step that ends a run does not return to the script
        assert len(legs["deepspeed"][rank]) == 9
        assert legs["deepspeed"][rank] == bare[rank][:9], "bit by bit"
        assert chance(legs["plain"][rank]) == chance(bare[rank][:9])


def chance(lines: list[str]) -> list[str]:
    """All but the loss, which another engine rounds in its own way."""
    return [line.partition(" loss ")[0] for line in lines]


def run_bare(folder: Path) -> list[list[str]]:
    """The script as a user starts it; the lines of each rank."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={free_port()}"]
    command += ["--redirects=3", "--log_dir", str(folder / "logs"), "train.py"]
    own = {
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        VARIABLE: str(cache_folder("cpu")),
    }
    subprocess.run(command, cwd=folder, env={**os.environ, **own}, timeout=300, check=True, capture_output=True)
    return [drawn(next((folder / "logs").glob(f"**/{rank}/stdout.log")).read_text()) for rank in (0, 1)]
