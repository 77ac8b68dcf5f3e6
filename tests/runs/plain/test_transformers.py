"""The plain engine under the Hugging Face Trainer and Accelerate."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
pytest.importorskip("transformers")


def train(folder: Path, optimizer: str) -> dict[str, Any]:
    """Run the Trainer's four steps in one rank (from the checkpoint of step 3 if the folder has it)."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    done = subprocess.run(
        [*command, str(HERE / "hf_rank.py"), str(folder), optimizer],
        env={**os.environ, "PYTHONPATH": str(HERE.parents[2]), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    seen: dict[str, Any] = json.loads((folder / "seen.json").read_text(encoding="utf-8"))
    return seen


@pytest.mark.parametrize("optimizer", ["from-config", pytest.param("own-optimizer", marks=pytest.mark.full)])
def test_a_trainer_runs_saves_and_resumes(tmp_path: Path, optimizer: str) -> None:
    seen = train(tmp_path, optimizer)
    assert seen["engine"] == "PlainEngine"
    assert (seen["steps"], seen["micro_batch"], seen["accumulation"]) == (4, 2, 2)
    assert seen["dtype"] == "torch.bfloat16"
    assert len(seen["losses"]) == 4
    assert seen["losses"][-1] < seen["losses"][0]
    assert all(norm > 0 for norm in seen["norms"])
    assert (tmp_path / "saved" / "model.safetensors").is_file()
    resumed = train(tmp_path, optimizer)
    assert resumed["steps"] == 4
    assert resumed["losses"] == seen["losses"]
    assert resumed["norms"] == seen["norms"], "the fourth step was done again from the checkpoint of the third"
