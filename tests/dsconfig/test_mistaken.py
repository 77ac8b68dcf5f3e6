"""Other files that are given for a ds_config: what they are is said, and what to give instead."""

import json

import pytest

from dsdoctor.case import Case
from dsdoctor.diagnoses import diagnose
from dsdoctor.dsconfig import ConfigUnreadable, load_config

ARGUMENTS = {"output_dir": "out", "per_device_train_batch_size": 4, "bf16": True}
FILES = {
    "args.json": (json.dumps(ARGUMENTS | {"deepspeed": "ds.json"}), "names a ds_config", "give ds.json"),
    "own_args.json": (json.dumps(ARGUMENTS), "TrainingArguments", "--hf-args"),
    "factory.yaml": ("### method\nstage: sft\ndeepspeed: ds_z3.json\n", "names a ds_config", "give ds_z3.json"),
    "distill.json": (
        json.dumps({"training": {"train_batch_size": 1}, "deepspeed_config": "configs/ds.json"}),
        "names a ds_config",
        "give configs/ds.json",
    ),
    "config.json": (json.dumps({"model_type": "llama", "hidden_size": 8}), "config.json of a model", "--model"),
    "fsdp.yaml": ("compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\n", "Accelerate for FSDP", "accelerate"),
    "nested.json": (json.dumps({"deepspeed": {"train_batch_size": 8}}), "stands under deepspeed", "file of its own"),
    "neox.yml": (
        '{"pipe-parallel-size": 1, "num-layers": 12, "zero_optimization": {"stage": 1}}',
        "GPT-NeoX",
        "prints",
    ),
    "config.py": ("import os\nconfig = dict(train_batch_size=8)\n", "this is Python", "json.dump"),
    "run.sh": ("deepspeed train.py --deepspeed ds_config.json\n", "shell script", "passes to DeepSpeed"),
    "ds.toml": ("train_batch_size = 8\n[zero_optimization]\nstage = 2\n", "this is TOML", "JSON"),
    "ds.yaml": ("train_batch_size: 8\nzero_optimization:\n  stage: 2\n", "this is YAML", "JSON"),
    "list.json": ('\n[{"train_batch_size": 8}]', "holds a list", "give the ds_config"),
    "empty.json": ("", "is empty", "--new"),
}


@pytest.mark.parametrize("name", FILES)
def test_what_it_is_is_said_and_nothing_else(tmp_path, name):
    content, what, instead = FILES[name]
    (tmp_path / name).write_text(content)
    config = load_config(tmp_path / name, release="0.19.8")
    (finding,) = diagnose(Case(config=config), strict=True).findings
    assert finding.id == "config/syntax"
    assert what in finding.cause
    assert instead in finding.fixes[0].text
    assert finding.evidence[0].line == (2 if name == "list.json" else 1)


def test_binary_is_no_text(tmp_path):
    (tmp_path / "ds.json").write_bytes(b"\x80\x04\x95\x00\x00")
    assert "no text file" in load_config(tmp_path / "ds.json").syntax_error.message


@pytest.mark.parametrize(
    "config",
    [
        {"train_batch_size": 8, "deepspeed": "ds.json", "model_type": "llama"},
        {"zero_optimization": {"stage": 1}, "output_dir": "mine"},
        {"fp16": {"enabled": True}, "my_script": {"deepspeed": "x"}},
    ],
)
def test_a_ds_config_with_keys_of_the_script_stays_one(tmp_path, config):
    (tmp_path / "ds.json").write_text(json.dumps(config))
    assert load_config(tmp_path / "ds.json").syntax_error is None


def test_the_file_that_accelerate_names_is_missing(tmp_path):
    (tmp_path / "a.yaml").write_text(
        "distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: nowhere.json\n"
    )
    with pytest.raises(ConfigUnreadable, match=r"nowhere.json, named by the config of Accelerate"):
        load_config(tmp_path / "a.yaml")
