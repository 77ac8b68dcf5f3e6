"""Finished runs are found again by their inputs, and only by them."""

import math

import pytest

from dsdoctor.finding import FirstBad
from dsdoctor.runs.facts import EngineFacts, Failure, Frame, ModelFacts, RankRun, Run, Step
from dsdoctor.runs.launcher import LaunchPlan
from dsdoctor.runs.spec import RunSpec
from dsdoctor.runs.store import keep, key_of, recall

PLAN = LaunchPlan(nproc=2)
VERSIONS = {"torch": "2.13.0"}


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("print(1)")
    return path


def spec(script, **values):
    values = {"folder": "/a", "config": {"fp16": {"enabled": True}}, **values}
    return RunSpec(script=str(script), cwd="/", **values)


def run(folder, outcome="stopped"):
    failure = Failure(rank=1, type="KeyError", message="'x'", frames=(Frame(file="t.py", line=3, function="f"),))
    bad = FirstBad(rank=1, step=0, micro_step=0, phase="forward", module="m", tensor="output", kind="nan")
    step = Step(index=0, losses=(math.nan, 1.0), grad_norm=math.inf, loss_scale=8.0, skipped=True)
    return Run(
        leg="with-deepspeed",
        engine="deepspeed",
        precision="as-configured",
        outcome=outcome,
        ranks=(RankRun(rank=0, steps=(step,)), RankRun(rank=1, failure=failure, first_bad=bad)),
        seconds=2.5,
        folder=str(folder),
        world_size=2,
        model=ModelFacts(class_name="Net", parameters=10, trainable=10, largest_layer=5, dtypes=(("float32", 10),)),
        facts=EngineFacts(framework="deepspeed", config={"a": [1]}, precision="fp16", zero_stage=2, optimizer=None),
    )


def stored(tmp_path, number, outcome="stopped", key="k"):
    folder = tmp_path / "reports" / f"{number:04d}" / "with-deepspeed"
    folder.mkdir(parents=True)
    made = run(folder, outcome)
    keep(made, key)
    return made


def test_a_run_comes_back_as_it_was(tmp_path):
    made = stored(tmp_path, 1)
    known = recall(tmp_path / "reports", "with-deepspeed", "k")
    # NaN is unequal to itself, so the texts are compared.
    assert repr(known) == repr(made)


def test_the_newest_wins_and_interrupted_ones_are_passed_over(tmp_path):
    stored(tmp_path, 2)
    newest = stored(tmp_path, 10)
    stored(tmp_path, 11, outcome="interrupted")
    assert recall(tmp_path / "reports", "with-deepspeed", "k").folder == newest.folder


def test_another_key_is_another_run(tmp_path):
    stored(tmp_path, 1)
    assert recall(tmp_path / "reports", "with-deepspeed", "other") is None


def test_a_damaged_file_is_passed_over(tmp_path):
    made = stored(tmp_path, 1)
    folder = tmp_path / "reports" / "0002" / "with-deepspeed"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text('{"key": "k", "run": {"outcome": ')
    assert recall(tmp_path / "reports", "with-deepspeed", "k").folder == made.folder


def test_the_key_follows_what_decides_a_run(script):
    key = key_of(spec(script), PLAN, VERSIONS)
    assert key == key_of(spec(script, folder="/elsewhere"), PLAN, VERSIONS)
    assert key != key_of(spec(script, steps=5), PLAN, VERSIONS)
    assert key != key_of(spec(script, config={}), PLAN, VERSIONS)
    assert key != key_of(spec(script), LaunchPlan(nproc=4), VERSIONS)
    assert key != key_of(spec(script), PLAN, {"torch": "2.14.0"})
    script.write_text("print(2)")
    assert key != key_of(spec(script), PLAN, VERSIONS)
