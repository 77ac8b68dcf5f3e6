"""Losses of two runs side by side."""

import math

import pytest

from dsdoctor.blame.compare import compare, diverged, nondeterministic, rounding
from dsdoctor.case import Case
from dsdoctor.runs.facts import EngineFacts, RankRun, Run, Step


def run(*losses, skipped=(), leg="with-deepspeed", precision="fp32"):
    facts = EngineFacts(framework="deepspeed", config={}, precision=precision, zero_stage=1, optimizer=None)
    steps = tuple(Step(index=i, losses=(loss,), skipped=i in skipped) for i, loss in enumerate(losses))
    return Run(
        leg=leg,
        engine="deepspeed",
        precision="as-configured",
        outcome="stopped",
        ranks=(RankRun(rank=0, steps=steps),),
        seconds=1.0,
        folder="",
        world_size=1,
        facts=facts,
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


def moved(by, precision="fp32", start=3, steps=10):
    """Two runs of which the second is off by a share from a step on."""
    steady = [2.0] * steps
    other = [2.0 * (1 + by) if step >= start else 2.0 for step in range(steps)]
    return run(*other, precision=precision), run(*steady, precision=precision)


@pytest.mark.parametrize(("precision", "rounded", "apart"), [("fp32", 1e-4, 0.01), ("bf16", 0.02, 0.3)])
def test_what_rounding_explains_depends_on_the_precision(precision, rounded, apart):
    assert compare(*moved(rounded, precision)).apart_from is None
    assert compare(*moved(apart, precision)).apart_from == 3


def test_rounding_grows_with_the_steps_and_never_explains_everything():
    assert rounding("bf16", 0) < rounding("bf16", 10) < rounding("bf16", 10**6) < 0.5


def test_one_hard_batch_is_no_divergence():
    assert compare(run(1.0, 1.0, 9.0, 1.0, 1.0, 1.0), run(*[1.0] * 6)).apart_from is None


def test_losses_near_zero_are_compared_on_the_scale_of_the_curve():
    falling = [2.0, 1.0, 1e-3, 1e-5, 1e-6, 1e-7]
    assert compare(run(*falling), run(*(x * 1.0001 + 1e-6 for x in falling))).apart_from is None


def legs(given, plain, again):
    names = ("with-deepspeed", "without-deepspeed", "repeat")
    return Case(runs=tuple(run(*losses, leg=leg) for leg, losses in zip(names, (given, plain, again), strict=True)))


def test_divergence_needs_a_control_that_repeats_itself_that_far():
    steady, away = [1.0] * 8, [1.0, 1.0, *[2.0] * 6]
    health = diverged(legs(away, steady, steady))
    assert health is not None
    assert (health.trouble, health.step) == ("diverged", 2)
    assert diverged(legs(steady, steady, steady)) is None
    assert diverged(legs(away, steady, away)) is None
    assert diverged(legs(away, steady, steady[:2])) is None
    assert nondeterministic(legs(steady, steady, away))
    assert not nondeterministic(legs(away, steady, steady))
