"""Processes that a signal ended, from a run and from logs, and aborts that are harmless."""

import pytest

from tests.diagnoses.examples import found
from tests.diagnoses.making import USER, event, failed, failure, healthy, log, process_exit

WATCHDOG = event("watchdog", rank=0, seq="931", op="ALLREDUCE", numel="4096", timeout="600000")
LOST = failure("RuntimeError", "[pair.cc:598] Connection closed by peer [10.0.0.12]:41872", USER, rank=0)
HEAP = event("abort-reason", "double free or corruption (!prev)", line=12)
CUDA = event("native-error", "an illegal memory access", error="CUDA error: an illegal memory access was encountered")
WORKER = "DataLoader worker (pid 4711) is killed by signal: {}."
DONE = event("finished", "{'train_runtime': 812.4}", line=5, order=5)

POSITIVE = {
    "launch/abort": [
        log(exits=(process_exit(-6, rank=1),), failures=(LOST,)),
        log(HEAP, exits=(process_exit(134),)),
        log(exits=(process_exit(250),)),
        log(HEAP),
        failed("RuntimeError", WORKER.format("Aborted"), USER),
        log(event("native-error", error="vector::_M_range_check"), exits=(process_exit(-6),)),
    ],
    "launch/signal": [log(exits=(process_exit(code, rank=1),)) for code in (-4, 136, 232)],
}
NEGATIVE = {
    "launch/abort": [
        log(WATCHDOG, exits=(process_exit(-6, rank=0),)),  # the watchdog's own abort
        log(CUDA, exits=(process_exit(-6),)),
        log(HEAP, exits=(process_exit(-6),), failures=(failure("KeyError", "'x'", USER),)),
        log(exits=(process_exit(-11),)),
        healthy(),
    ],
    "launch/signal": [
        log(exits=(process_exit(-15), process_exit(-9))),
        log(exits=(process_exit(-4),), failures=(failure("KeyError", "'x'", USER),)),
        log(exits=(process_exit(1),)),
    ],
}


@pytest.mark.parametrize(("identifier", "case"), [(i, c) for i, cases in POSITIVE.items() for c in cases])
def test_positive(identifier, case):
    (finding,) = found(case, identifier)
    assert finding.severity == "error"
    assert not found(case, "launch/user-exception")


@pytest.mark.parametrize(("identifier", "case"), [(i, c) for i, cases in NEGATIVE.items() for c in cases])
def test_negative(identifier, case):
    assert not found(case, identifier)


def test_the_rank_that_aborts_is_the_root_and_what_it_said_the_proof():
    case = log(HEAP, exits=(process_exit(-6, rank=1),), failures=(LOST,))
    (finding,) = found(case, "launch/abort")
    assert finding.cause == "rank 1 aborted (signal 6): double free or corruption (!prev)"
    assert finding.evidence[0].line == 12
    assert found(case, "launch/peer-failure")[0].role == "consequence"


def test_an_abort_after_the_work_is_only_noted():
    case = log(DONE, exits=(process_exit(-6, rank=1),), failures=(LOST,))
    (finding,) = found(case, "launch/abort")
    assert finding.severity == "info"
    assert not found(case, "launch/peer-failure")


def test_a_signal_is_named_with_its_meaning():
    (finding,) = found(log(exits=(process_exit(-4, rank=1),)), "launch/signal")
    assert "rank 1 was ended by signal 4 (SIGILL): an instruction that this CPU does not have" in finding.cause


@pytest.mark.parametrize("word", ["Segmentation fault", "Aborted"])
def test_a_worker_of_the_data_loader(word):
    case = failed("RuntimeError", WORKER.format(word), USER)
    identifier = {"Aborted": "launch/abort", "Segmentation fault": "launch/segfault"}[word]
    assert "a worker of the data loader" in found(case, identifier)[0].cause
    assert not found(case, "launch/user-exception")
