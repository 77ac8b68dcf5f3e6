"""`dsdoctor.lint_config`: the lint without the command."""

import json

import pytest

import dsdoctor
from dsdoctor.cli.main import main
from dsdoctor.dsconfig import ConfigUnreadable


def test_a_dict():
    found = dsdoctor.lint_config({"train_batch_size": 8, "zero_optimization": {"stage": 5}})
    assert found.exit_code == 1
    assert [finding.keys for finding in found.findings] == [("zero_optimization.stage",)]
    typo = dsdoctor.lint_config({"train_batch_size": 8, "zero_optimisation": {"stage": 2}})
    assert [finding.id for finding in typo.findings] == ["config/unknown-key"]
    assert typo.exit_code == 0  # DeepSpeed takes it without a word


def test_a_healthy_dict_of_an_older_release():
    found = dsdoctor.lint_config({"train_batch_size": 8, "bf16": {"enabled": True}}, deepspeed_version="0.14.4")
    assert found.exit_code == 0
    assert found.case.config.table_release == "0.14.4"


def test_the_batch_for_a_world_size():
    config = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1}
    assert dsdoctor.lint_config(config, world_size=2).exit_code == 0
    (finding,) = dsdoctor.lint_config(config, world_size=3).findings
    assert finding.id == "config/batch-size"


def test_the_document_is_that_of_the_command(tmp_path, capsys):
    path = tmp_path / "ds_config.json"
    path.write_text('{"train_batch_size": 8, "zero_optimization": {"stage": 5}}')
    assert main(["config", str(path), "--json"]) == 1
    printed = json.loads(capsys.readouterr().out)
    given = json.loads(json.dumps(dsdoctor.lint_config(path).to_dict()))
    assert {**printed, "created": ""} == {**given, "created": ""}


def test_a_file_that_is_not_there():
    with pytest.raises(ConfigUnreadable, match="no such ds_config"):
        dsdoctor.lint_config("nowhere.json")
