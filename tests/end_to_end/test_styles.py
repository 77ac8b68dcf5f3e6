"""Scripts in the style of public examples, unchanged: what they get for the config on the command line.

Each is healthy, in both legs; what differs is how it asks for DeepSpeed.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.command import Document, call, ids, notes, stage, steps

STYLES = Path(__file__).parent / "styles"
ADAM = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
BF16 = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 1,
    "optimizer": ADAM,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 1, "reduce_bucket_size": 100_000},
}
CLIENT = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 1, "reduce_bucket_size": 100_000},
}
AUTO = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "torch_adam": True}},
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
    },
    "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"},
}

pytestmark = pytest.mark.full


def examine(
    tmp_path: Path, style: str, config: dict[str, Any], *script_args: str, env: dict[str, str] | None = None
) -> Document:
    """Triage a style; it must be healthy in both legs and leave the user's folder as it was."""
    shutil.copy(STYLES / f"{style}.py", tmp_path / "train.py")
    shutil.copy(STYLES / "classes.txt", tmp_path)
    (tmp_path / "ds_config.json").write_text(json.dumps(config))
    (tmp_path / "theirs.json").write_text(json.dumps({**config, "gradient_clipping": 7.0}))
    before = sorted(os.listdir(tmp_path))
    arguments = ["triage", "ds_config.json", "train.py", "--nproc", "2", "--steps", "5"]
    arguments += ["--stages", "memory,with-deepspeed,without-deepspeed"]
    code, document = call(arguments, tmp_path, *script_args, env=env)
    assert (code, document["verdict"]["blame"]) == (0, "healthy"), document
    assert not ids(document, "error")
    assert (steps(document, "with-deepspeed"), steps(document, "without-deepspeed")) == (5, 5)
    assert sorted(os.listdir(tmp_path)) == sorted([*before, "dsdoctor-report"])
    return document


def config_in_force(document: Document) -> dict[str, Any]:
    """As the engine of rank 0 got it."""
    trace = Path(stage(document, "with-deepspeed")["details"]["folder"]) / "trace-rank0.jsonl"
    events = map(json.loads, trace.read_text().splitlines())
    found: dict[str, Any] = next(event for event in events if event["event"] == "initialize")["facts"]["config"]
    return found


@pytest.mark.parametrize("client", ["none", "objects", "callables"])
def test_cifar_with_config_arguments(tmp_path: Path, client: str) -> None:
    arguments = ("--deepspeed", "--deepspeed_config", "theirs.json", "--client", client)
    document = examine(tmp_path, "cifar", BF16 if client == "none" else CLIENT, *arguments)
    assert "gradient_clipping" not in config_in_force(document)
    assert any("differs from the given one, which is used, in: gradient_clipping" in note for note in notes(document))


def test_cifar_with_its_config_as_a_dict(tmp_path: Path) -> None:
    document = examine(tmp_path, "cifar", BF16, "--dict")
    assert config_in_force(document) == BF16
    assert any("train_batch_size" in note for note in notes(document))


@pytest.mark.parametrize("device", [("--use_cpu", "--bf16"), ()])
def test_gpt2_with_the_trainer(tmp_path: Path, device: tuple[str, ...]) -> None:
    """Also for a start that names no device, where Transformers refuses `--bf16` itself if there is no GPU."""
    given = (*device, "--output_dir", "out", "--report_to", "none", "--max_steps", "20")
    batch = ("--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "2", "--warmup_steps", "3")
    rate = ("--learning_rate", "2e-3", "--max_grad_norm", "0.5", "--save_steps", "2")
    document = examine(tmp_path, "gpt2_finetune", AUTO, *given, *batch, *rate, "--deepspeed", "theirs.json")
    config = config_in_force(document)
    assert config["optimizer"]["params"]["lr"] == 2e-3
    assert config["scheduler"]["params"]["warmup_num_steps"] == 3
    assert (config["train_micro_batch_size_per_gpu"], config["gradient_accumulation_steps"]) == (4, 2)
    assert config["gradient_clipping"] == 0.5, "of the arguments, not of theirs.json"
    assert config["bf16"]["enabled"] is ("--bf16" in device)
    assert config["train_batch_size"] == 4 * 2 * 2, "of two ranks"
    told = notes(document)
    assert any("differs from the given one, which is used, in: gradient_clipping" in note for note in told)
    assert any(note.startswith("Transformers filled in: ") and "gradient_clipping = 0.5" in note for note in told)


def test_gpt2_with_a_config_in_its_training_arguments(tmp_path: Path) -> None:
    document = examine(tmp_path, "gpt2_finetune", AUTO, "--in_code", "theirs.json")
    config = config_in_force(document)
    assert (config["optimizer"]["params"]["lr"], config["gradient_clipping"]) == (3e-3, 1.0)


ENVIRONMENT = {
    "ACCELERATE_USE_DEEPSPEED": "true",
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
    "ACCELERATE_MIXED_PRECISION": "bf16",
}


@pytest.mark.parametrize(("how", "env"), [("plugin", {}), ("file", {}), ("environment", ENVIRONMENT)])
def test_accelerate(tmp_path: Path, how: str, env: dict[str, str]) -> None:
    document = examine(tmp_path, "accelerate_nlp", BF16, "--how", how, "--config", "theirs.json", env=env)
    config = config_in_force(document)
    assert (config["zero_optimization"]["stage"], config.get("gradient_clipping")) == (1, None)
    for leg in ("with-deepspeed", "without-deepspeed"):
        differing = [note for note in notes(document, leg) if "differs from the given one" in note]
        assert len(differing) == 1, "Accelerate's own copies of the given config are not the script's"
    assert stage(document, "with-deepspeed")["details"]["ranks"][0]["completed"]


def test_pipeline_is_examined_with_deepspeed_only(tmp_path: Path) -> None:
    config = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "optimizer": ADAM}
    shutil.copy(STYLES / "pipeline.py", tmp_path / "train.py")
    (tmp_path / "ds_config.json").write_text(json.dumps(config))
    arguments = ["triage", "ds_config.json", "train.py", "--nproc", "2", "--steps", "5"]
    arguments += ["--stages", "with-deepspeed,without-deepspeed"]
    code, document = call(arguments, tmp_path, "--deepspeed", "--deepspeed_config", "ds_config.json")
    assert (code, document["verdict"]["blame"]) == (0, "healthy"), document
    assert steps(document, "with-deepspeed") == 5
    without = stage(document, "without-deepspeed")
    assert without["status"] == "skipped"
    assert "pipeline" in without["why"].lower()


@pytest.mark.parametrize("how", [("--strategy", "deepspeed_stage_2"), ("--config", "theirs.json")])
def test_lightning_rehearsed_on_the_cpu(tmp_path: Path, how: tuple[str, str]) -> None:
    """Lightning itself refuses a config with `gradient_accumulation_steps` or `gradient_clipping`."""
    pytest.importorskip("lightning")
    config = {key: BF16[key] for key in ("train_micro_batch_size_per_gpu", "bf16", "zero_optimization")}
    document = examine(tmp_path, "lightning_module", {**config, "zero_allow_untested_optimizer": True}, *how)
    assert config_in_force(document)["zero_optimization"]["stage"] == 1
    assert any("Lightning's refusal to use DeepSpeed on a CPU is lifted" in note for note in notes(document))


def test_lightnings_fabric(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    config = {key: BF16[key] for key in ("train_micro_batch_size_per_gpu", "bf16", "zero_optimization")}
    document = examine(tmp_path, "lightning_fabric", {**config, "zero_allow_untested_optimizer": True})
    assert any("steps DeepSpeed's optimizer, not its engine" in note for note in notes(document))
    assert "; losses within 0.0%" in stage(document, "without-deepspeed")["why"]


def test_key_that_lightning_refuses_is_the_configs_fault(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    shutil.copy(STYLES / "lightning_module.py", tmp_path / "train.py")
    (tmp_path / "ds_config.json").write_text(json.dumps({**BF16, "gradient_accumulation_steps": 2}))
    code, document = call(["blame", "ds_config.json", "train.py", "--nproc", "2", "--steps", "5"], tmp_path)
    verdict = document["verdict"]
    assert (code, verdict["blame"], verdict["culprit"]) == (1, "config", ["gradient_accumulation_steps"])
