"""When the plain run is made: wherever it can tell more than the run with DeepSpeed did."""

from dataclasses import replace

import pytest

from dsdoctor.runs.spec import RunSpec
from dsdoctor.stages import legs
from dsdoctor.triage import StageResult
from tests.stages.making import examination, failure, run


@pytest.mark.parametrize(("losses", "status"), [((), "skipped"), ((1.0, 0.9), "failed")])
def test_a_fault_in_the_config_explains_an_exception_only_before_the_first_step(monkeypatch, tmp_path, losses, status):
    """fp16 at stage 0 fails the lint and trains all the same: a KeyError after that has to be compared."""
    config = {"fp16": {"enabled": True}}
    made = examination(tmp_path, config)
    made.results.append(StageResult(name="config", status="failed", why="fp16 at ZeRO stage 0"))
    spec = RunSpec(script="train.py", cwd=str(tmp_path), folder=str(tmp_path), config=config)
    raised = run(spec, losses, failure=failure("'unknown'", "KeyError"))
    made.learn(runs=(replace(raised, leg="with-deepspeed"),))
    monkeypatch.setattr(legs, "observe", lambda *_args, **_more: replace(raised, leg="without-deepspeed"))
    assert legs.without_deepspeed(made).status == status
