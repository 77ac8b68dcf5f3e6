"""The order of the stages: crashes, interruption, budget, and the exit code that follows."""

from dataclasses import replace
from pathlib import Path

import pytest

from dsdoctor import stages, triage
from dsdoctor.finding import Verdict
from dsdoctor.job import Job
from dsdoctor.runs.facts import EngineFacts, RankRun, Run, Step
from dsdoctor.triage import STAGES, StageResult


@pytest.fixture
def job(tmp_path):
    def make(**values):
        return Job(config=Path("ds.json"), script="train.py", folder=tmp_path, **values)

    return make


def passed(examination):
    return StageResult(name="?", status="passed")


def healthy_run(examination):
    facts = EngineFacts(framework="deepspeed", config={}, precision="bf16", zero_stage=1, optimizer="AdamW")
    run = Run(
        leg="with-deepspeed",
        engine="deepspeed",
        precision="as-configured",
        outcome="stopped",
        ranks=(RankRun(rank=0, steps=(Step(index=0, losses=(1.0,)),), completed=True, called_engine=True),),
        seconds=1.0,
        folder="",
        world_size=1,
        facts=facts,
    )
    examination.learn(runs=(*examination.case.runs, run))
    return StageResult(name="?", status="passed")


@pytest.fixture
def replaced(monkeypatch):
    """All stages pass at once; a test replaces the ones it is about."""

    def replace(**some):
        table = dict.fromkeys(STAGES, passed) | {"with-deepspeed": healthy_run}
        table |= {name.replace("_", "-"): stage for name, stage in some.items()}
        monkeypatch.setattr(stages, "ALL", table)

    return replace


def names(result):
    return [stage.name for stage in result.stages]


def test_all_stages_in_their_order(job, replaced):
    replaced()
    result = triage.triage(job())
    assert tuple(names(result)) == STAGES
    assert (result.verdict.blame, result.exit_code) == ("healthy", 0)


def test_a_stage_that_crashes_is_a_result_and_the_rest_goes_on(job, replaced):
    def crash(examination):
        raise RuntimeError("boom")

    replaced(comm=crash)
    result = triage.triage(job())
    broken = result.stages[2]
    assert (broken.status, broken.why) == ("crashed", "RuntimeError: boom")
    assert "crash" in broken.details["traceback"]
    assert len(result.stages) == len(STAGES)


def test_ctrl_c_ends_the_stages_and_what_is_known_is_told(job, replaced):
    def interrupt(examination):
        raise KeyboardInterrupt

    replaced(without_deepspeed=interrupt)
    result = triage.triage(job())
    assert names(result)[-1] == "without-deepspeed"
    assert result.verdict.blame == "healthy"
    assert result.exit_code == 3


def test_a_spent_budget_ends_the_stages(job, replaced):
    replaced()
    result = triage.triage(job(budget=0.0))
    assert names(result) == []
    assert result.exit_code == 3


def test_only_the_asked_stages(job, replaced):
    replaced()
    assert names(triage.triage(job(stages=("numerics", "comm")))) == ["environment", "config", "comm", "numerics"]


def test_nothing_run_is_inconclusive(job, replaced):
    replaced(with_deepspeed=passed)
    result = triage.triage(job())
    assert (result.verdict.blame, result.exit_code) == ("inconclusive", 4)


def test_blame_that_no_finding_explains_is_no_success(job, replaced):
    replaced()
    result = triage.triage(job())
    blamed = replace(result, findings=(), verdict=Verdict(blame="script", summary="s", confidence=0.5))
    assert (result.exit_code, blamed.exit_code) == (0, 1)


def test_each_stage_is_told_as_it_ends(job, replaced):
    replaced()
    told = []
    triage.triage(job(), done=told.append)
    assert [stage.name for stage in told] == list(STAGES)
