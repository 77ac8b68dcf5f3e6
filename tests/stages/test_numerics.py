"""Runs on whole weights: their config, and what the stage takes over from them."""

import math
from dataclasses import replace

import pytest

from dsdoctor.case import Case
from dsdoctor.dsconfig.facts import ConfigFacts
from dsdoctor.finding import FirstBad
from dsdoctor.job import Job, NumericsOrder
from dsdoctor.numerics.examined import Examined, Trial
from dsdoctor.runs.facts import RankRun, Run, Step
from dsdoctor.stages import numerics
from dsdoctor.stages.numerics import whole
from dsdoctor.triage import Examination


@pytest.mark.parametrize(
    ("given", "changed"),
    [
        ({"zero_optimization": {"stage": 3, "overlap_comm": True}}, {"zero_optimization": {"stage": 0}}),
        ({"zero_optimization": {"stage": 2}}, {"zero_optimization": {"stage": 2}}),
        (
            {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4},
            {"train_micro_batch_size_per_gpu": 4},
        ),
        (
            {"train_batch_size": 64, "gradient_accumulation_steps": 4},
            {"train_batch_size": 4, "gradient_accumulation_steps": 4},
        ),
        ({"train_batch_size": "auto"}, {"train_batch_size": "auto"}),
    ],
)
def test_weights_are_whole_and_the_batch_fits_one_rank(given, changed):
    before = repr(given)
    assert whole(given, ranks=1) == changed
    assert repr(given) == before


def numerics_run(folder, known, **bad):
    """A run of two ranks whose second rank saw the first bad value."""
    value = FirstBad(rank=1, step=2, micro_step=0, phase="forward", module="a", tensor="output", kind="inf", **bad)
    ranks = (RankRun(rank=0), RankRun(rank=1, first_bad=value, patch="old", examined=known))
    return Run(
        leg="numerics",
        engine="deepspeed",
        precision="as-configured",
        outcome="stopped",
        ranks=ranks,
        seconds=1.0,
        folder=str(folder),
        world_size=2,
    )


def staged(monkeypatch, tmp_path, *runs):
    """The stage with these runs in place of real ones; what it asked to be run."""
    asked, left = [], list(runs)

    def observe(examination, leg, **values):
        asked.append(values)
        return left.pop(0)

    monkeypatch.setattr(numerics, "observe", observe)
    given = replace(runs[0], leg="with-deepspeed", ranks=(RankRun(rank=1, steps=(Step(index=2, losses=(math.nan,)),)),))
    config = ConfigFacts(data={"zero_optimization": {"stage": 3}}, path="c.json")
    job = Job(config=tmp_path / "c.json", script="t.py", folder=tmp_path, numerics=NumericsOrder())
    examination = Examination(job=job, case=Case(config=config, runs=(given,)))
    return numerics.numerics(examination), examination, asked


PARTITIONED = Examined(why_not="its weights are partitioned: every rank would have to take part")
CURED = Examined(again="not-finite", trials=(Trial(remedy="eps", text="t", outcome="finite", patch="new"),))


def test_what_a_run_without_partitioning_learnt_is_taken_over(monkeypatch, tmp_path):
    first = numerics_run(tmp_path, PARTITIONED, cause="domain")
    second = replace(first, ranks=(replace(first.ranks[1], examined=CURED, patch="new"),))
    result, examination, asked = staged(monkeypatch, tmp_path, first, second)
    assert [values["config"] for values in asked[1:]] == [{"zero_optimization": {"stage": 0}}]
    assert result.details["patch"] == "new"
    assert examination.case.examined == CURED


def test_another_value_is_not_taken_over(monkeypatch, tmp_path):
    first = numerics_run(tmp_path, PARTITIONED, cause="domain")
    elsewhere = replace(first.ranks[1].first_bad, module="b")
    second = replace(first, ranks=(replace(first.ranks[1], first_bad=elsewhere, examined=CURED),))
    result, examination, _ = staged(monkeypatch, tmp_path, first, second)
    assert result.details["patch"] == "old"
    assert examination.case.examined == PARTITIONED
