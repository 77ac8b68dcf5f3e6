"""Accelerate's own config files: the ds_config they come to, and where its keys stand."""

import json

import pytest

from dsdoctor.dsconfig import ConfigUnreadable, load_config

BLOCK = """compute_environment: LOCAL_MACHINE
deepspeed_config:
  gradient_accumulation_steps: 4
  offload_optimizer_device: none
  offload_param_device: cpu
  zero3_init_flag: true
  zero_stage: 3
distributed_type: DEEPSPEED
mixed_precision: bf16
num_processes: 4
"""
FLOW = "deepspeed_config: {zero_stage: 3, offload_param_device: cpu, gradient_accumulation_steps: 4}\n"


def read(folder, name, text):
    path = folder / name
    path.write_text(text)
    return load_config(path)


def place(facts, key):
    found = facts.where(key)
    return found.line, found.column


def test_a_block_of_yaml(tmp_path):
    facts = read(tmp_path, "a.yaml", BLOCK)
    assert facts.value("zero_optimization.stage") == 3
    assert facts.value("zero_optimization.offload_param.device") == "cpu"
    assert not facts.has("zero_optimization.offload_optimizer")
    assert facts.value("bf16.enabled") is True
    assert (facts.framework, facts.world_size, facts.derived) == ("accelerate", 4, True)
    assert place(facts, "zero_optimization.stage") == (7, 3)
    assert place(facts, "zero_optimization.offload_param") == (5, 3)
    assert place(facts, "bf16.enabled") == (9, 1)


def test_yaml_on_one_line(tmp_path):
    facts = read(tmp_path, "a.yml", FLOW)
    assert place(facts, "zero_optimization.offload_param.device") == (1, FLOW.index("offload_param_device") + 1)


def test_as_json(tmp_path):
    given = {"deepspeed_config": {"zero_stage": 2}, "distributed_type": "DEEPSPEED", "num_processes": 2}
    facts = read(tmp_path, "a.json", json.dumps(given, indent=1))
    assert facts.value("zero_optimization.stage") == 2
    assert (facts.world_size, facts.derived) == (2, True)
    assert place(facts, "zero_optimization.stage") == (3, 3)


def test_a_file_that_only_names_the_ds_config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ds.json").write_text('{"train_batch_size": 8}')
    facts = read(tmp_path, "a.yaml", "deepspeed_config:\n  deepspeed_config_file: ds.json\nnum_processes: 2\n")
    assert (facts.path, facts.value("train_batch_size"), facts.world_size) == ("ds.json", 8, 2)
    with pytest.raises(ConfigUnreadable, match=r"nowhere\.json"):
        read(tmp_path, "b.yaml", "deepspeed_config:\n  deepspeed_config_file: nowhere.json\n")


@pytest.mark.parametrize("text", ["- 1\n- 2\n", "a: 3\n", "deepspeed_config: 3\n", "", "3\n"])
def test_other_yaml_is_a_mistake(tmp_path, text):
    assert "this is YAML" in read(tmp_path, "a.yaml", text).syntax_error.message


def test_broken_yaml_says_so(tmp_path):
    with pytest.raises(ConfigUnreadable, match="flow node"):
        read(tmp_path, "a.yaml", "a: [1,\n")


def test_a_ds_config_with_a_section_of_that_name_is_none_of_accelerates(tmp_path):
    facts = read(tmp_path, "ds.json", '{"train_batch_size": 8, "deepspeed_config": {"note": 1}}')
    assert facts.value("train_batch_size") == 8
    assert not facts.derived
