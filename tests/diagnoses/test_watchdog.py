"""Timeouts and network errors, compared over the ranks of a log."""

from dataclasses import replace

import pytest

from dsdoctor.finding import Evidence
from tests.diagnoses.examples import found
from tests.diagnoses.making import TORCH, USER, event, failed, healthy, log, log_failure, process_exit

STAGE_3 = {"config": {"zero_optimization": {"stage": 3}}}


def late(rank, *, seq=41877, op="ALLREDUCE", numel=7340032):
    return event("watchdog", f"[Rank {rank}] Watchdog caught collective operation timeout", rank=rank, line=170 + rank,
                 order=170 + rank, seq=str(seq), op=op, numel=str(numel), timeout="1800000")  # fmt: skip


ALL_LATE = tuple(late(rank) for rank in range(4))
MISMATCH = "Detected mismatch between collectives on ranks. Rank 0 is running collective: CollectiveFingerPrint("
TIMED_OUT = "[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 30000ms for recv operation to complete"
GATHERS = tuple(late(rank, op="_ALLGATHER_BASE") for rank in range(4))
SETS_OUT = tuple(late(rank, seq=2, numel=1) for rank in (1, 2, 3))
DOCKER = event("nccl-interface", interfaces="[0]docker0:172.17.0.1<0> [1]eno1:192.0.2.21<0>")
REFUSED = event("connect-failed", address="172.17.0.1")
UNEVEN = (event("rank-batches", rank=0, batches="212", line=12), event("rank-batches", rank=1, batches="194", line=11))

POSITIVE = {
    "comm/collective-mismatch": [
        log(late(0, numel=16), late(1, numel=17)),
        log(late(0, op="ALLREDUCE"), late(1, op="BROADCAST")),
        log_failure("RuntimeError", MISMATCH, USER, TORCH),
        failed("RuntimeError", MISMATCH, USER, TORCH),
    ],
    "comm/rank0-work-timeout": [log(*SETS_OUT)],
    "comm/timeout": [
        log(*ALL_LATE[:3], ranks=(0, 1, 2, 3)),
        log_failure("RuntimeError", TIMED_OUT, USER, TORCH),
    ],
    "comm/ib-error": [log(event("ib-completion", status="5", rank=0), event("ib-completion", status="12", rank=5))],
    "comm/wrong-interface": [log(DOCKER, REFUSED)],
    "zero3/moe-hang": [log(*GATHERS, event("experts"), event("trace-invalidated"), **STAGE_3)],
}
NEGATIVE = {
    "comm/collective-mismatch": [log(*ALL_LATE), log(late(0, seq=5), late(1, seq=6, numel=1)), healthy()],
    "comm/rank0-work-timeout": [
        log(*SETS_OUT, late(0, seq=2, numel=1)),
        log(*SETS_OUT, steps_seen=40),
        log(*ALL_LATE[1:]),
        log_failure("KeyError", "'x'", USER),
    ],
    "comm/timeout": [
        log(*ALL_LATE, failures=log_failure("ValueError", "bad sample", USER).logs.failures),
        log(*ALL_LATE, event("device-assert")),
        log(late(0, numel=16), late(1, numel=17)),
        healthy(),
    ],
    "comm/ib-error": [
        log(),
        log(event("ib-completion", status="12"), failures=log_failure("KeyError", "'x'").logs.failures),
    ],
    "comm/wrong-interface": [
        log(DOCKER),
        log(REFUSED),
        log(event("nccl-interface", interfaces="[0]eno1:192.0.2.21<0> [1]docker0:172.17.0.1<0>"), REFUSED),
    ],
    "zero3/moe-hang": [
        log(*GATHERS, event("experts"), event("leaf-modules"), **STAGE_3),
        log(*GATHERS, event("experts"), config={"zero_optimization": {"stage": 2}}),
        log(*GATHERS, **STAGE_3),
        log(*ALL_LATE, event("experts"), **STAGE_3),
    ],
}


@pytest.mark.parametrize(("identifier", "case"), [(i, c) for i, cases in POSITIVE.items() for c in cases])
def test_positive(identifier, case):
    assert len(found(case, identifier)) == 1
    assert not found(case, "launch/user-exception")


@pytest.mark.parametrize(("identifier", "case"), [(i, c) for i, cases in NEGATIVE.items() for c in cases])
def test_negative(identifier, case):
    assert not found(case, identifier)


def test_a_gather_that_times_out_after_the_order_changed_is_a_branch():
    (finding,) = found(log(*GATHERS, event("trace-invalidated"), **STAGE_3), "zero3/branch-hang")
    assert finding.evidence[0].text == "text"
    assert not found(log(*GATHERS, event("trace-invalidated"), event("experts"), **STAGE_3), "zero3/branch-hang")
    assert not found(log(*ALL_LATE, event("trace-invalidated"), **STAGE_3), "zero3/branch-hang")


@pytest.mark.parametrize(
    ("text", "line", "root"),
    [
        ("srun: error: gpu07: task 3: Killed", 90, "memory/host-oom-kill"),
        ("  exitcode  : -9 (pid: 4103)  (SIGKILL)", 300, "comm/timeout"),  # torchrun ended what did not answer
        ("node2: exits with return code = -9", 300, "comm/timeout"),
    ],
)
def test_who_was_killed_before_is_what_the_others_waited_for(text, line, root):
    killed = replace(process_exit(-9, rank=3, line=line), evidence=Evidence(source="train.log", line=line, text=text))
    case = log(*ALL_LATE[:3], exits=(killed,))
    (timeout_or_kill,) = found(case, root)
    assert timeout_or_kill.role == "root"
    assert bool(found(case, "comm/timeout")) == (root == "comm/timeout")


def test_the_silent_rank_is_named():
    (finding,) = found(log(*ALL_LATE[:3], ranks=(0, 1, 2, 3)), "comm/timeout")
    assert "rank 3 says nothing" in finding.cause


def test_the_rank_whose_link_failed_stands_first():
    (finding,) = found(POSITIVE["comm/ib-error"][0], "comm/ib-error")
    assert finding.evidence[0].rank == 5


def test_timeouts_after_an_exception_are_a_consequence():
    case = log(*ALL_LATE, failures=log_failure("ValueError", "bad sample", USER).logs.failures)
    assert found(case, "launch/peer-failure")
    assert found(case, "launch/user-exception")


def test_uneven_batches_of_a_log_need_a_timeout():
    waiting = log(*UNEVEN, failures=log_failure("RuntimeError", TIMED_OUT, USER).logs.failures)
    (finding,) = found(waiting, "hang/uneven-batches")
    assert "rank 1 has 194 batches and rank 0 has 212" in finding.cause
    assert not found(log(*UNEVEN), "hang/uneven-batches")
