"""The judgement of single runs: what is a failure and what only looks like one."""

import math
from dataclasses import replace

import pytest

from dsdoctor.blame.health import judge
from dsdoctor.runs.facts import EngineFacts, Failure, RankRun, Run, Step

NAN, INF = math.nan, math.inf


def run(*, outcome="stopped", ranks, precision="bf16", dynamic=False):
    facts = EngineFacts(
        framework="deepspeed",
        config={},
        precision=precision,
        zero_stage=1,
        optimizer="AdamW",
        dynamic_loss_scale=dynamic,
    )
    return Run(
        leg="with-deepspeed",
        engine="deepspeed",
        precision="as-configured",
        outcome=outcome,
        ranks=ranks,
        seconds=1.0,
        folder="",
        world_size=len(ranks),
        facts=facts,
    )


def rank(number, *steps, **values):
    return RankRun(rank=number, completed=True, steps=steps, **values)


def good(index, loss=1.0):
    return Step(index=index, losses=(loss,), grad_norm=0.5)


def test_steps_with_finite_numbers_are_no_failure():
    assert not judge(run(ranks=(rank(0, good(0), good(1)), rank(1, good(0), good(1))))).failed


def test_the_earliest_bad_value_over_all_ranks_is_told():
    late = rank(0, good(0), good(1), good(2, NAN))
    early = rank(1, good(0), good(1, INF), good(2, NAN))
    health = judge(run(ranks=(late, early)))
    assert (health.trouble, health.step, health.rank) == ("non-finite", 1, 1)


def test_a_bad_loss_of_another_engine_is_a_failure_too():
    step = Step(index=1, losses=(1.0,), other_losses=(2.0, NAN), grad_norm=0.5)
    health = judge(run(ranks=(rank(0, good(0), step),)))
    assert (health.trouble, health.why) == ("non-finite", "the loss of another engine is nan in step 1 on rank 0")


def test_a_scale_search_is_no_failure():
    skipped = Step(index=0, losses=(1.0,), grad_norm=INF, loss_scale=65536.0, next_scale=32768.0, skipped=True)
    assert not judge(run(ranks=(rank(0, skipped, good(1)),), precision="fp16", dynamic=True)).failed


def test_a_skipped_step_in_bf16_is_a_failure_that_deepspeed_only_survived():
    skipped = Step(index=4, losses=(1.0,), grad_norm=INF, skipped=True)
    health = judge(run(ranks=(rank(0, *(good(i) for i in range(4)), skipped, good(5)),)))
    assert (health.trouble, health.step) == ("non-finite", 4)


def test_skipping_every_step_is_a_failure_even_while_the_scale_is_still_searched():
    steps = [Step(index=i, losses=(1.0,), loss_scale=2.0**-i, skipped=True) for i in range(3)]
    assert judge(run(ranks=(rank(0, *steps),), precision="fp16", dynamic=True)).trouble == "all-skipped"


def test_bad_numbers_explain_the_exception_that_follows_them():
    failure = Failure(rank=0, type="Exception", message="Current loss scale already at minimum")
    ranks = (RankRun(rank=0, steps=(good(0), good(1, NAN)), failure=failure),)
    health = judge(run(outcome="raised", ranks=ranks))
    assert health.numeric


@pytest.mark.parametrize("outcome", ["raised", "exited", "killed", "hung", "timeout", "not-started"])
def test_every_bad_end_of_the_processes_is_a_failure(outcome):
    health = judge(run(outcome=outcome, ranks=(RankRun(rank=0),)))
    assert health.trouble == outcome
    assert not health.numeric


@pytest.mark.parametrize("outcome", ["stopped", "finished", "interrupted"])
def test_other_ends_are_none(outcome):
    assert not judge(run(outcome=outcome, ranks=(rank(0, good(0)),))).failed


def test_the_first_exception_in_time_is_the_one_that_is_told():
    second = Failure(rank=0, type="RuntimeError", message="Connection closed by peer", time=12.0)
    first = Failure(rank=1, type="KeyError", message="'unknown'", time=11.0, step=6)
    ranks = (RankRun(rank=0, failure=second), RankRun(rank=1, failure=first))
    health = judge(run(outcome="raised", ranks=ranks))
    assert (health.rank, health.step) == (1, 6)
    assert "KeyError" in health.why


def test_a_killed_rank_is_told_and_not_the_exception_of_the_peer_that_lost_it():
    lost = Failure(rank=0, type="RuntimeError", message="Connection closed by peer", time=12.0)
    ranks = (RankRun(rank=0, failure=lost), RankRun(rank=1, exit_code=-9))
    killed = "rank 1 was ended by signal 9 (SIGKILL)"
    assert judge(replace(run(outcome="killed", ranks=ranks), why=killed)).why == killed
