"""Ranks that wait for each other as logs show it, nodes that disagree, and work that is only slow."""

import pytest

from dsdoctor.runs.facts import Frame
from tests.diagnoses.examples import found
from tests.diagnoses.making import USER, event, failed, failure, healthy, log, log_failure, series

GENERATE = Frame(file="/env/lib/python3.11/site-packages/transformers/generation/utils.py", line=8, function="generate")
COLLECTIVE = Frame(
    file="/env/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line=8, function="all_reduce"
)
LOST = "NCCL communicator was aborted on rank 1."
IN_VAIN = "Timed out after 1801 seconds waiting for clients. 8/16 clients joined."
BROKEN = "NCCL error in: ProcessGroupNCCL.cpp:1691, internal error, NCCL version 2.18.1"
STAGE_3 = {"settings": {"zero_optimization.stage": 3}}


def watchdog(rank, *, op="ALLREDUCE", seq="1", numel="1"):
    return event("watchdog", rank=rank, seq=seq, op=op, numel=numel, timeout="600000", line=30 + rank)


def nccl(host, version):
    return event("nccl-version", process=host, nccl=version)


def launched(size, line):
    return event("world-size", size=size, line=line)


def timers(forward, backward, step):
    names = {"forward_ms": forward, "backward_ms": backward, "step_ms": step}
    return {"series": tuple(series(name, *([value] * 5)) for name, value in names.items())}


BOTH_WAIT = (watchdog(0), watchdog(1))
ALL = {"ranks": (0, 1)}
P2P = event("nccl-p2p", rank=0)
PAIR_OF_VERSIONS = (nccl("gpu01", "2.20.5"), nccl("gpu02", "2.18.1"))
STOPPED = failure("KeyboardInterrupt", "", USER, COLLECTIVE, rank=0)
STOPPED_IN_GENERATE = failure("KeyboardInterrupt", "", USER, GENERATE, rank=0)
IN_GENERATE = failure("DistBackendError", LOST, USER, GENERATE)
SLOW = event("slow-bar", count=8)

POSITIVE = {
    "comm/p2p-hang": [
        log(P2P, *BOTH_WAIT, **ALL),
        log(event("gpu-name", gpu="NVIDIA GeForce RTX 4090"), *BOTH_WAIT, **ALL),
        log(P2P, failures=(STOPPED,)),
        failed("NotImplementedError", "Using RTX 3090 or 4000 series doesn't support faster communication broadband "
               "via P2P or IB.", USER),
    ],
    "zero3/generate-hang": [
        log(*BOTH_WAIT, failures=(IN_GENERATE,), **STAGE_3),
        log(*BOTH_WAIT, event("generate-frame"), **STAGE_3),
    ],
    "hang/slow-not-hung": [
        log(SLOW, failures=(STOPPED_IN_GENERATE,)),
        log(SLOW, failures=(STOPPED,), **STAGE_3),
    ],
    "launch/world-size-mismatch": [
        log(launched("16", 1), launched("8", 2), failures=(failure("DistStoreError", IN_VAIN, USER),)),
        log_failure("RuntimeError", "Invalid rank requested : 8/8", USER),
    ],
    "version/rank-mismatch": [log(*PAIR_OF_VERSIONS, failures=(failure("DistBackendError", BROKEN, USER),))],
    "speed/offload-bound": [log(event("cpu-adam"), event("one-thread"), **timers(376.0, 864.0, 22880.0))],
}  # fmt: skip
NEGATIVE = {
    "comm/p2p-hang": [
        log(*BOTH_WAIT, **ALL),  # nothing says that P2P is used
        log(P2P, watchdog(1), **ALL),  # rank 0 does not wait
        log(P2P, *BOTH_WAIT, steps_seen=5, **ALL),
        log(P2P, watchdog(0), watchdog(1, op="BROADCAST"), **ALL),
        log(P2P, failures=(failure("KeyboardInterrupt", "", USER),)),
        log(P2P),
        healthy(),
    ],
    "zero3/generate-hang": [
        log(*BOTH_WAIT, failures=(IN_GENERATE,)),  # the stage is not known
        log(*BOTH_WAIT, failures=(failure("DistBackendError", LOST, USER),), **STAGE_3),
        log(failures=(IN_GENERATE,), **STAGE_3),
    ],
    "hang/slow-not-hung": [
        log(SLOW),
        log(SLOW, failures=(failure("KeyboardInterrupt", "", USER),)),  # nothing says that the work is slow by itself
        log(event("slow-bar", count=2), failures=(STOPPED_IN_GENERATE,)),
    ],
    "launch/world-size-mismatch": [
        log(launched("16", 1), failures=(failure("DistStoreError", IN_VAIN, USER),)),
        log(launched("16", 1), launched("8", 2)),
    ],
    "version/rank-mismatch": [
        log(*PAIR_OF_VERSIONS),
        log(nccl("gpu01", "2.20.5"), nccl("gpu02", "2.20.5"), failures=(failure("DistBackendError", BROKEN, USER),)),
        log(*PAIR_OF_VERSIONS, failures=(failure("KeyError", "'x'", USER),)),
    ],
    "speed/offload-bound": [
        log(**timers(376.0, 864.0, 22880.0)),  # nothing says that the optimizer is offloaded
        log(event("cpu-adam"), **timers(376.0, 864.0, 880.0)),
        log(event("cpu-adam")),
    ],
}


@pytest.mark.parametrize(("identifier", "case"), [(i, c) for i, cases in POSITIVE.items() for c in cases])
def test_positive(identifier, case):
    assert len(found(case, identifier)) == 1
    assert not found(case, "launch/user-exception")
    assert not found(case, "comm/timeout")


@pytest.mark.parametrize(("identifier", "case"), [(i, c) for i, cases in NEGATIVE.items() for c in cases])
def test_negative(identifier, case):
    assert not found(case, identifier)


def test_a_job_that_only_seemed_to_hang_was_not_cancelled_for_nothing():
    (cancelled,) = found(POSITIVE["hang/slow-not-hung"][0], "launch/cancelled")
    assert cancelled.role == "consequence"


def test_ranks_that_did_not_come_are_counted():
    (finding,) = found(log_failure("DistStoreError", IN_VAIN, USER), "comm/missing-rank")
    assert "8 of 16" in finding.cause
