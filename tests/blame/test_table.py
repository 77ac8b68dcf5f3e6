"""The legs side by side."""

import math

from dsdoctor.blame.table import table
from dsdoctor.case import Case
from dsdoctor.runs.facts import EngineFacts, Failure, Frame, RankRun, Run, Step

FINE = tuple(Step(index=i, losses=(1.0,)) for i in range(4))
NAN = (*FINE[:2], Step(index=2, losses=(math.nan,)))


def leg(name, steps=FINE, *, engine="deepspeed", failure=None, precision="bf16"):
    facts = EngineFacts(framework="deepspeed", config={}, precision=precision, zero_stage=1, optimizer=None)
    return Run(
        leg=name,
        engine=engine,
        precision="as-configured",
        outcome="raised" if failure else "stopped",
        ranks=(RankRun(rank=0, steps=steps, failure=failure),),
        seconds=1.0,
        folder="",
        world_size=1,
        facts=facts,
    )


def told(*runs):
    return [(cell.engine, cell.precision, cell.text) for cell in table(Case(runs=runs))]


def test_what_was_not_run_says_so():
    assert told(leg("with-deepspeed", NAN), leg("without-deepspeed", engine="plain")) == [
        ("with DeepSpeed", "bf16", "non-finite in step 2"),
        ("without DeepSpeed", "bf16", "ok, 4 steps"),
        ("with DeepSpeed", "fp32", "not run"),
        ("without DeepSpeed", "fp32", "not run"),
    ]


def test_a_config_in_fp32_has_no_second_row():
    assert len(told(leg("with-deepspeed", precision="fp32"))) == 2


def test_an_exception_is_told_with_the_users_own_line():
    inside = Frame(file="/x/site-packages/torch/a.py", line=1, function="f")
    frames = (Frame(file="/home/u/train.py", line=12, function="main"), inside)
    failure = Failure(rank=0, type="KeyError", message="'a'", frames=frames)
    assert told(leg("with-deepspeed", failure=failure))[0][2] == "KeyError at train.py:12"


def test_what_cannot_be_played_is_no_failure():
    failure = Failure(rank=0, type="dsdoctor.runs.plain.NotPlayed", message="a pipeline")
    assert told(leg("with-deepspeed"), leg("without-deepspeed", engine="plain", failure=failure))[1][2] == (
        "not played: a pipeline"
    )


def test_no_run_no_table():
    assert table(Case()) == ()
