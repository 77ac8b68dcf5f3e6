"""The stage `config` of triage: it hands the rules what script and model say, beside the config itself."""

import json

from dsdoctor.machine.facts import MachineFacts
from dsdoctor.stages.checks import config
from dsdoctor.triage import Examination
from tests.stages.making import examination

STARTS = "import deepspeed\nengine, *_ = deepspeed.initialize(model=net, optimizer=opt)\n"
FP16 = {"train_micro_batch_size_per_gpu": 1, "fp16": {"enabled": True}, "zero_optimization": {"stage": 1}}


def staged(folder, data, script, *words) -> Examination:
    made = examination(folder, data, args=words, nproc=2)
    made.learn(machine=MachineFacts(versions={"deepspeed": "0.19.8", "torch": "2.13.0"}))
    (folder / "ds.json").write_text(json.dumps(data))
    (folder / "train.py").write_text(script)
    return made


def test_the_scripts_calls_are_judged_with_the_config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = staged(tmp_path, FP16, STARTS + "loss.backward()\n")
    result = config(made)
    assert result.status == "failed"
    assert "never engine.backward()" in result.why
    assert made.case.script.calls_any("initialize")
    assert config(staged(tmp_path, FP16, STARTS + "engine.backward(loss)\n")).status == "passed"


def test_the_model_that_the_script_loads_is_judged_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net").mkdir()
    (tmp_path / "net" / "config.json").write_text('{"model_type": "gemma", "dtype": "bfloat16"}')
    made = staged(tmp_path, FP16, STARTS + "engine.backward(loss)\n", "--model_name_or_path", "net")
    result = config(made)
    assert result.status == "warned"
    assert "saved in bf16" in result.why
    assert made.case.model.model_type == "gemma"
