"""Hangs: who waits for whom."""

from dataclasses import replace

import pytest

from dsdoctor.case import Case
from dsdoctor.runs.facts import Collective, EngineFacts, Failure, Frame, RankRun, Run, Step
from tests.diagnoses.examples import found

SCRIPT = Frame(file="/home/u/train.py", line=80, function="main", text="dist.barrier()")
BARRIER = Frame(file="/env/site-packages/torch/distributed/distributed_c10d.py", line=4, function="barrier")
SLEEP = Frame(file="/home/u/train.py", line=44, function="read", text="time.sleep(3600)")
REDUCE = Frame(file="/env/site-packages/deepspeed/runtime/engine.py", line=9, function="allreduce")


def steps(count):
    return tuple(Step(index=i, losses=(1.0,)) for i in range(count))


def hung(*ranks, outcome="hung", leg="with-deepspeed", stage=1):
    return Case(
        runs=(
            Run(
                leg=leg,
                engine="deepspeed",
                precision="as-configured",
                outcome=outcome,
                ranks=ranks,
                seconds=30.0,
                folder="",
                world_size=len(ranks),
                steps_asked=20,
                facts=EngineFacts(
                    framework="deepspeed", config={}, precision="bf16", zero_stage=stage, optimizer="AdamW"
                ),
            ),
        )
    )


READS_LOSS = Frame(file="/home/u/train.py", line=81, function="main", text="print(loss.item())")
ON_THE_GPU = RankRun(
    rank=0,
    steps=steps(8),
    last_step=8,
    last_phase="script",
    stack=(READS_LOSS,),
    collectives=(Collective(group="0", group_name="default_pg", number=9, operation="all_reduce"),),
)
WAITS_IN_STEP = RankRun(rank=0, steps=steps(8), last_step=8, last_phase="step", stack=(SCRIPT, REDUCE, BARRIER))
LEFT_LOOP = RankRun(rank=1, steps=steps(8), last_step=7, last_phase="script", stack=(SCRIPT, BARRIER))
SLEEPS = RankRun(rank=1, steps=steps(8), last_step=7, last_phase="script", stack=(SLEEP,))
BOTH_IN_STEP = RankRun(rank=1, steps=steps(8), last_step=8, last_phase="step", stack=(SCRIPT, REDUCE, BARRIER))
ENDED = RankRun(rank=1, steps=steps(8), last_step=7, last_phase="script", completed=True)
LEFT_BY_HAND = RankRun(rank=1, steps=steps(8), last_step=8, last_phase="script", exit_code=0)
LOST = RankRun(
    rank=0,
    steps=steps(8),
    last_step=8,
    last_phase="step",
    failure=Failure(rank=0, type="RuntimeError", message="[gloo] Connection closed by peer [127.0.0.1]:4242"),
)
RAISED = RankRun(rank=1, steps=steps(8), last_phase="script", failure=Failure(rank=1, type="KeyError", message="'x'"))

LOOP = (70, 60)
BACKWARD = Frame(file="/home/u/train.py", line=75, function="main", text="engine.backward(loss)", loops=LOOP)
SAVE = Frame(file="/home/u/train.py", line=78, function="main", text="engine.save_checkpoint(d)", loops=LOOP)
PAST_INNER = Frame(file="/home/u/train.py", line=82, function="main", text="dist.barrier()", loops=LOOP[1:])
IN_BACKWARD = RankRun(rank=1, steps=steps(4), last_step=4, last_phase="backward", stack=(BACKWARD, REDUCE, BARRIER))
SAVES_ALONE = RankRun(rank=0, steps=steps(4), last_step=4, last_phase="script", stack=(SAVE, BARRIER))
ENDED_EPOCH = RankRun(rank=0, steps=steps(4), last_step=4, last_phase="script", stack=(PAST_INNER, BARRIER))

BRANCH = Frame(file="/home/u/train.py", line=20, function="forward", text="h = h + self.img(x)")
HEAD = Frame(file="/home/u/train.py", line=21, function="forward", text="return self.out(h)")
GATHERS_BRANCH = RankRun(rank=0, steps=steps(3), last_step=3, last_phase="forward", stack=(BRANCH, REDUCE, BARRIER))
GATHERS_HEAD = RankRun(rank=1, steps=steps(3), last_step=3, last_phase="forward", stack=(HEAD, REDUCE, BARRIER))
GATHERS_BRANCH_TOO = RankRun(rank=1, steps=steps(3), last_step=3, last_phase="forward", stack=(BRANCH, REDUCE, BARRIER))
IS_BEHIND = RankRun(rank=1, steps=steps(2), last_step=2, last_phase="forward", stack=(HEAD, REDUCE, BARRIER))
IN_BACKWARD_OF_3 = RankRun(rank=1, steps=steps(3), last_step=3, last_phase="backward", stack=(BRANCH, REDUCE, BARRIER))


def quiet(rank, seconds):
    return replace(rank, quiet=float(seconds), printed="still waiting")


def late(*ranks):
    """A run that was ended by its time limit; after 60 s without a word a rank counts as standing still."""
    return hung(*ranks, outcome="timeout")


JOINS = Frame(file="/env/site-packages/torch/multiprocessing/spawn.py", line=9, function="join")
SPAWNS = RankRun(rank=0, last_phase="script", stack=(SCRIPT, JOINS))
POSITIVE = {
    "launch/own-ranks": [hung(SPAWNS), hung(SPAWNS, replace(SPAWNS, rank=1))],
    "zero3/branch-hang": [
        hung(GATHERS_BRANCH, GATHERS_HEAD, stage=3),
        hung(GATHERS_BRANCH, IN_BACKWARD_OF_3, stage=3),
    ],
    "comm/collective-mismatch": [hung(SAVES_ALONE, IN_BACKWARD)],
    "hang/uneven-batches": [
        hung(WAITS_IN_STEP, LEFT_LOOP),
        hung(LOST, ENDED, outcome="raised"),
        hung(LOST, LEFT_BY_HAND, outcome="raised"),
        hung(ENDED_EPOCH, IN_BACKWARD),
    ],
    "hang/stalled-rank": [hung(WAITS_IN_STEP, SLEEPS), hung(SLEEPS), late(quiet(SLEEPS, 70), quiet(WAITS_IN_STEP, 65))],
    "speed/out-of-time": [
        late(quiet(SLEEPS, 0.3)),
        late(quiet(SLEEPS, 0.3), quiet(WAITS_IN_STEP, 90)),
        late(quiet(WAITS_IN_STEP, 20), ENDED),
    ],
}
NEGATIVE = {
    "launch/own-ranks": [hung(SLEEPS), hung(replace(SPAWNS, completed=True)), hung(SPAWNS, outcome="stopped"), Case()],
    "zero3/branch-hang": [
        hung(GATHERS_BRANCH, GATHERS_HEAD, stage=2),
        hung(GATHERS_BRANCH, GATHERS_BRANCH_TOO, stage=3),
        hung(GATHERS_BRANCH, IS_BEHIND, stage=3),
        hung(GATHERS_BRANCH, SLEEPS, stage=3),
        hung(GATHERS_BRANCH, GATHERS_HEAD, stage=3, outcome="stopped"),
    ],
    "comm/collective-mismatch": [
        hung(WAITS_IN_STEP, LEFT_LOOP),
        hung(ENDED_EPOCH, IN_BACKWARD),
        hung(SAVES_ALONE, IN_BACKWARD, outcome="stopped"),
    ],
    "hang/uneven-batches": [
        hung(SAVES_ALONE, IN_BACKWARD),
        hung(WAITS_IN_STEP, SLEEPS),
        hung(WAITS_IN_STEP, BOTH_IN_STEP),
        hung(WAITS_IN_STEP, LEFT_LOOP, outcome="stopped"),
        hung(LOST, RAISED, outcome="raised"),
        hung(LOST, replace(LEFT_BY_HAND, exit_code=-15, ended_by_us=True), outcome="raised"),
        Case(),
    ],
    "hang/stalled-rank": [
        hung(SPAWNS),
        hung(WAITS_IN_STEP, LEFT_LOOP),
        hung(WAITS_IN_STEP, SLEEPS, outcome="raised"),
        late(quiet(SLEEPS, 0.3), quiet(WAITS_IN_STEP, 90)),
        Case(),
    ],
    "speed/out-of-time": [
        hung(quiet(SLEEPS, 70)),
        late(quiet(SLEEPS, 70)),
        hung(quiet(WAITS_IN_STEP, 0.1), outcome="stopped"),
        Case(),
    ],
}


@pytest.mark.parametrize(("identifier", "case"), [(i, c) for i, cases in POSITIVE.items() for c in cases])
def test_positive(identifier, case):
    assert found(case, identifier)


@pytest.mark.parametrize(("identifier", "case"), [(i, c) for i, cases in NEGATIVE.items() for c in cases])
def test_negative(identifier, case):
    assert not found(case, identifier)


def test_the_stuck_line_is_shown():
    (finding,) = found(hung(WAITS_IN_STEP, SLEEPS), "hang/stalled-rank")
    assert "train.py:44" in finding.cause
    assert "time.sleep(3600)" in finding.cause
    assert "rank 1" in finding.cause


def test_a_run_that_was_still_at_work_is_told_with_its_last_words():
    (finding,) = found(late(quiet(SLEEPS, 0.3), quiet(WAITS_IN_STEP, 90)), "speed/out-of-time")
    assert "rank 1 was still at work at /home/u/train.py:44 in read" in finding.cause
    assert finding.cause.startswith("8 of 20 optimizer steps were made in 30 s")
    assert finding.evidence[0].text.endswith("it printed last: still waiting")
    assert "nothing new for 90 s" in finding.evidence[1].text


def test_a_process_that_is_stopped_has_no_stack_to_show():
    stopped = RankRun(rank=1, steps=steps(8), last_step=8, last_phase="script", state="T")
    (finding,) = found(hung(WAITS_IN_STEP, stopped), "hang/stalled-rank")
    assert finding.cause.startswith("the process of rank 1 is stopped")


def test_an_endless_loop_is_busy():
    (finding,) = found(hung(WAITS_IN_STEP, replace(SLEEPS, moved=True)), "hang/stalled-rank")
    assert finding.cause.startswith("rank 1 is busy at /home/u/train.py:44")


def test_both_ranks_are_in_the_evidence_of_uneven_batches():
    (finding,) = found(hung(WAITS_IN_STEP, LEFT_LOOP), "hang/uneven-batches")
    assert {evidence.rank for evidence in finding.evidence} == {0, 1}
    assert finding.cause.startswith("rank 1 left its training loop after 8 steps")


def test_the_call_of_one_rank_alone_is_named():
    (finding,) = found(hung(SAVES_ALONE, IN_BACKWARD), "comm/collective-mismatch")
    assert "rank 0 waits at /home/u/train.py:78: engine.save_checkpoint(d)" in finding.cause
    assert "every rank" in finding.fixes[0].text


def test_rank_whose_collective_is_on_the_gpu_waits_for_the_others():
    (finding,) = found(hung(ON_THE_GPU, SLEEPS), "hang/stalled-rank")
    assert finding.cause.startswith("rank 1 stands still at /home/u/train.py:44")
    assert "it waits in all_reduce (number 9 of the default group)" in finding.evidence[0].text
