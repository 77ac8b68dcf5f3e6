"""The real command on real DeepSpeed with two ranks: what a user gets for the great ways in which a run fails."""

import json
import shutil
from pathlib import Path

import pytest

from tests.end_to_end.command import call, ids, stage

SCRIPTS = Path(__file__).parent / "scripts"
SMALL_BUCKETS = {"reduce_bucket_size": 100_000, "allgather_bucket_size": 100_000}
OPTIMIZER = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
BF16 = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": OPTIMIZER,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 1, **SMALL_BUCKETS},
}
FP32 = {key: value for key, value in BF16.items() if key != "bf16"}
HF = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "torch_adam": True}},
    "zero_optimization": {"stage": 2, **SMALL_BUCKETS},
}
HF_ARGUMENTS = [
    *("--output_dir", "out", "--use_cpu", "--bf16", "--report_to", "none", "--save_strategy", "no"),
    *("--per_device_train_batch_size", "4", "--max_steps", "12", "--deepspeed", "ds_config.json"),
]


def triage(tmp_path, script, config, *script_args, options=()):
    shutil.copy(SCRIPTS / script, tmp_path / "train.py")
    (tmp_path / "ds_config.json").write_text(json.dumps(config))
    arguments = ["triage", "ds_config.json", "train.py", "--nproc", "2", "--steps", "6", *options]
    return call(arguments, tmp_path, *script_args)


def test_healthy_bf16(tmp_path):
    code, document = triage(tmp_path, "regression.py", BF16)
    assert code == 0, document
    assert document["verdict"]["blame"] == "healthy"
    assert not ids(document, "error")
    assert not ids(document, "warning")
    assert [s["status"] for s in document["stages"]] == ["passed"] * 6 + ["skipped"] * 3
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ds_config.json", "dsdoctor-report", "train.py"]


def test_the_demo_is_blamed_on_precision(tmp_path):
    code, document = call(["demo"], tmp_path)
    verdict = document["verdict"]
    assert code == 1
    assert verdict["blame"] == "precision"
    bad = verdict["first_bad"]
    # The rare token is in every sentence from the ninth on, and a step takes four sentences.
    assert (bad["step"], bad["phase"], bad["kind"]) == (2, "forward", "inf")
    assert bad["module"] == "encoder.block.1.layer.1.DenseReluDense.wo"
    details = stage(document, "numerics")["details"]
    assert "encoder.block.1.layer.1.DenseReluDense.wi_0" in details["frames"]
    assert "DenseReluDense.wo" in details["patch"]
    assert any("bf16" in fix["text"] for finding in document["findings"] for fix in finding["fixes"])


@pytest.mark.full
def test_a_nan_of_the_script_in_fp32(tmp_path):
    code, document = triage(tmp_path, "regression.py", FP32, "--fault", "nan")
    assert code == 1
    assert document["verdict"]["blame"] == "script"
    assert "numerics/nan-loss" in ids(document, "error")
    bad = document["verdict"]["first_bad"]
    assert (bad["step"], bad["phase"]) == (3, "forward")


def test_an_exception_on_rank_1(tmp_path):
    code, document = triage(tmp_path, "regression.py", BF16, "--fault", "raise")
    assert code == 1
    assert document["verdict"]["blame"] == "script"
    first = document["findings"][0]
    assert first["id"] == "launch/user-exception"
    assert any(e["rank"] == 1 and "no shard for step 3" in e["text"] for e in first["evidence"])


@pytest.mark.full
def test_a_hang_on_rank_1(tmp_path):
    code, document = triage(tmp_path, "regression.py", BF16, "--fault", "hang", options=("--stall", "10"))
    assert code == 1
    assert document["verdict"]["blame"] == "script"
    first = document["findings"][0]
    assert first["id"] == "hang/stalled-rank"
    assert "time.sleep(3600)" in first["cause"]
    assert "rank 1" in first["cause"]


@pytest.mark.full
def test_batch_sizes_that_do_not_multiply(tmp_path):
    wrong = {**BF16, "train_batch_size": 64, "gradient_accumulation_steps": 2}
    code, document = triage(tmp_path, "regression.py", wrong)
    assert code == 1
    assert document["verdict"]["blame"] == "config"
    assert "config/batch-size" in ids(document, "error")
    assert "train_batch_size" in document["verdict"]["culprit"]


@pytest.mark.full
def test_hf_trainer_healthy(tmp_path):
    code, document = triage(tmp_path, "hf_trainer.py", HF, *HF_ARGUMENTS)
    assert code == 0, document
    assert document["verdict"]["blame"] == "healthy"
    assert len(stage(document, "without-deepspeed")["details"]["ranks"][0]["steps"]) == 6
    assert not (tmp_path / "out").exists()


@pytest.mark.full
def test_the_healthy_demo(tmp_path):
    code, document = call(["demo", "--healthy"], tmp_path)
    assert (code, document["verdict"]["blame"]) == (0, "healthy")
