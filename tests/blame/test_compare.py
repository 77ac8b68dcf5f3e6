"""Losses of two runs side by side."""

import math

from dsdoctor.blame.compare import compare
from dsdoctor.runs.facts import RankRun, Run, Step


def run(*losses, skipped=()):
    steps = tuple(Step(index=i, losses=(loss,), skipped=i in skipped) for i, loss in enumerate(losses))
    return Run(
        leg="with-deepspeed",
        engine="deepspeed",
        precision="as-configured",
        outcome="stopped",
        ranks=(RankRun(rank=0, steps=steps),),
        seconds=1.0,
        folder="",
        world_size=1,
    )


def test_the_largest_relative_difference_and_its_step():
    result = compare(run(1.0, 2.0, 4.0), run(1.0, 1.9, 3.0))
    assert (result.steps, result.at_step) == (3, 2)
    assert math.isclose(result.largest_difference, 0.25)


def test_a_non_finite_loss_ends_the_comparison():
    assert compare(run(1.0, math.nan, 1.0), run(1.0, 1.0, 1.0)).steps == 1


def test_steps_that_only_one_run_skipped_end_it_too():
    assert compare(run(1.0, 1.0, 1.0, skipped=(1,)), run(1.0, 1.0, 1.0)).steps == 1


def test_runs_without_steps_cannot_be_compared():
    assert compare(run(), run(1.0)).steps == 0
