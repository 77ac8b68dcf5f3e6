"""One observed run on behalf of a stage: what the budget cut short and what the script deleted blames nobody."""

import shutil
from pathlib import Path

import pytest

from dsdoctor.blame.health import judge
from dsdoctor.job import Job
from dsdoctor.runs.facts import RankRun, Run, Step
from dsdoctor.stages import observe
from dsdoctor.stages.legs import told
from dsdoctor.triage import Examination


@pytest.fixture
def observed(tmp_path, monkeypatch):
    """The run that a stage gets where the supervised one went as `during` and `outcome` say."""

    def run(*, outcome, during=lambda folder: None, **limits):
        def supervise(spec, plan, limits, leg, progress):
            folder = Path(spec.folder)
            folder.mkdir(parents=True)
            during(folder)
            return Run(
                leg=leg,
                engine="deepspeed",
                precision="as-configured",
                outcome=outcome,
                why="not done after 5 s",
                ranks=(RankRun(rank=0, steps=(Step(index=0, losses=(1.0,)),)),),
                seconds=5.0,
                folder=spec.folder,
                world_size=1,
            )

        monkeypatch.setattr(observe, "supervise", supervise)
        job = Job(config=tmp_path / "ds.json", script="train.py", folder=tmp_path / "r" / "0001", **limits)
        examination = Examination(job=job)
        return observe.observe(examination, "with-deepspeed", engine="deepspeed"), examination

    return run


def test_a_run_that_the_budget_ends_is_no_failure_of_the_script(observed):
    run, examination = observed(outcome="timeout", budget=0.0)
    assert examination.out_of_budget
    assert not judge(run).failed
    result = told(run)
    assert (result.status, result.why) == ("timeout", "the budget was used up in this run")


def test_a_run_that_its_own_limit_ends_is_one(observed):
    run, examination = observed(outcome="timeout", budget=1000.0)
    assert not examination.out_of_budget
    assert judge(run).trouble == "timeout"


def test_a_script_that_deletes_the_report_is_told_so(observed):
    run, _ = observed(outcome="not-started", during=shutil.rmtree)
    assert not judge(run).failed
    result = told(run)
    assert result.status == "crashed"
    assert "the script deleted" in result.why
    assert "--out" in result.why
