"""`dsdoctor blame` on real DeepSpeed: the search for the key, a checkpoint to go on from, models with fewer layers."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.command import call, notes, stage
from tests.end_to_end.test_triage import HF, HF_ARGUMENTS

SCRIPTS = Path(__file__).parent / "scripts"
CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 0.7,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "reduce_bucket_size": 100_000, "allgather_bucket_size": 100_000},
}
OPTIONS = ("--nproc", "2", "--steps", "8")

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]


@pytest.fixture
def folder(tmp_path):
    shutil.copy(SCRIPTS / "partitioned.py", tmp_path / "train.py")
    (tmp_path / "ds_config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def blame(folder, *options, args=()):
    return call(["blame", "ds_config.json", "train.py", *OPTIONS, *options], folder, *args)


def test_the_guilty_key_and_the_smallest_patch(folder):
    code, document = blame(folder, "--bisect")
    verdict = document["verdict"]
    assert (code, verdict["blame"], verdict["culprit"]) == (1, "config", ["zero_optimization.stage"])
    found = stage(document, "bisect")["details"]
    assert found["patch"] == {"zero_optimization": {"stage": 1}}
    assert found["verified"]
    assert found["minimal"]
    fix = next(f for f in document["findings"] if f["id"] == "config/guilty-key")["fixes"][0]
    assert fix["patch"] == {"zero_optimization": {"stage": 1}}
    mended = {**CONFIG, "zero_optimization": {**CONFIG["zero_optimization"], "stage": 1}}
    (folder / "ds_config.json").write_text(json.dumps(mended))
    assert blame(folder)[0] == 0


def test_without_bisect_no_key_is_searched(folder):
    _code, document = blame(folder)
    assert document["verdict"]["blame"] == "deepspeed"
    assert stage(document, "bisect")["status"] == "skipped"


def test_both_legs_go_on_from_a_checkpoint_of_deepspeed(folder):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    lower = json.dumps({**CONFIG, "zero_optimization": {**CONFIG["zero_optimization"], "stage": 1}})
    (folder / "ds_config.json").write_text(lower)
    subprocess.run([*torchrun, "train.py", "--save", "saved"], cwd=folder, check=True, capture_output=True, timeout=300)
    fresh, resumed = blame(folder)[1], blame(folder, "--from", "saved")[1]
    for name in ("with-deepspeed", "without-deepspeed"):
        assert any("goes on from the checkpoint" in note for note in notes(resumed, name))
        assert losses(resumed, name)[0] != losses(fresh, name)[0]
    assert resumed["verdict"]["blame"] == "healthy"
    assert losses(resumed, "with-deepspeed") == pytest.approx(losses(resumed, "without-deepspeed"), rel=2e-2)


def test_a_model_with_fewer_layers(folder):
    shutil.copy(SCRIPTS / "hf_trainer.py", folder / "train.py")
    text = (folder / "train.py").read_text().replace("n_layer=2", "n_layer=5")
    (folder / "train.py").write_text(text)
    (folder / "ds_config.json").write_text(json.dumps(HF))
    code, document = blame(folder, "--shrink", args=HF_ARGUMENTS)
    assert (code, document["verdict"]["blame"]) == (0, "healthy")
    for name in ("with-deepspeed", "without-deepspeed"):
        assert any("n_layer is 2 in place of 5" in note for note in notes(document, name))


def losses(document, name):
    return [step[1] for step in stage(document, name)["details"]["ranks"][0]["steps"]]
