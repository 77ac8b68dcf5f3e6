"""Ranks that cannot meet or talk, and shared memory that ran out: hand-made results of the communication check."""

import pytest

from dsdoctor.case import Case
from dsdoctor.comm.facts import CommFacts, CommRank, CommStep, Resolution
from dsdoctor.machine.facts import MachineFacts
from dsdoctor.runs.facts import Failure, Frame, RankRun, Run
from tests.diagnoses.examples import found

HERE = Resolution(name="127.0.0.1", addresses=("127.0.0.1",), local=True)
WAITING = 'File "/env/torch/distributed/distributed_c10d.py", line 3, in all_reduce'
SLEEPING = 'File "/home/u/site.py", line 7, in hook\n    time.sleep(600)'
BEGINNING = (CommStep(name="import", status="passed"), CommStep(name="rendezvous", status="passed"))


def step(status: str, name: str = "all_reduce", **values) -> CommStep:
    return CommStep(name=name, status=status, dtype="bf16", seconds=30.0, **values)


def rank(number: int, *steps: CommStep, ending: str = "finished", code: int | None = 0) -> CommRank:
    return CommRank(rank=number, pid=100 + number, host="a", exit_code=code, ending=ending, time=5.0, steps=steps)


def healthy(number: int, code: int = 0) -> CommRank:
    return rank(number, *BEGINNING, step("passed"), CommStep(name="goodbye", status="passed"), code=code)


def comm(*ranks: CommRank, **values) -> Case:
    values = {"world_size": max(2, len(ranks)), "master_addr": "127.0.0.1", "resolution": HERE} | values
    return Case(comm=CommFacts(ranks=ranks, **values))


def failed(type_: str, message: str, *frames: Frame) -> Case:
    failure = Failure(rank=1, type=type_, message=message, frames=frames, source="with-deepspeed", time=1.0)
    return job(RankRun(rank=0), RankRun(rank=1, exit_code=1, failure=failure))


def job(*ranks: RankRun, outcome: str = "raised") -> Case:
    run = Run(
        leg="with-deepspeed",
        engine="deepspeed",
        precision="as-configured",
        outcome=outcome,
        ranks=ranks,
        seconds=9.0,
        folder="/tmp/x",
        world_size=len(ranks),
    )
    return Case(runs=(run,))


WAITER = rank(0, *BEGINNING, step("timeout", stack=WAITING), ending="gave-up", code=75)
HEALTHY = comm(healthy(0), healthy(1))
ABORTED_AFTER_WORK = comm(healthy(0), healthy(1, code=-6))
STALLED = comm(WAITER, rank(1, *BEGINNING, step("unfinished", stack=SLEEPING), ending="terminated", code=143))
STOPPED = comm(WAITER, rank(1, *BEGINNING, step("unfinished"), ending="stopped", code=None))
DIED = comm(
    rank(0, *BEGINNING, step("failed", text="RuntimeError: Connection closed by peer"), code=1),
    rank(1, *BEGINNING, step("unfinished"), ending="died", code=-9),
)
BUS_ERROR = comm(
    rank(0, *BEGINNING, step("failed", text="RuntimeError: Connection closed by peer"), code=1),
    rank(1, *BEGINNING, step("unfinished"), ending="died", code=-7),
)
MISSING = comm(
    rank(0, BEGINNING[0], step("failed", "rendezvous", text="MissingRanks: not at the rendezvous: rank 1"), code=1),
    rank(1, ending="never-started", code=None),
)
ALL_WAIT = comm(WAITER, rank(1, *BEGINNING, step("unfinished", stack=WAITING), ending="terminated", code=143))
WRONG = comm(
    rank(
        0,
        *BEGINNING,
        step("wrong-value", text="WrongValue: 1 of 8 elements are wrong; the contribution of rank 1"),
        CommStep(name="goodbye", status="passed"),
    ),
    healthy(1),
)
OUT_OF_MEMORY = comm(
    rank(0, *BEGINNING, step("failed", "allocation", text="OutOfMemoryError: CUDA out of memory"), code=1),
    rank(1, *BEGINNING, step("unfinished", "process-group", stack=WAITING), ending="terminated", code=143),
)
NO_SHM = comm(
    rank(
        0,
        *BEGINNING,
        step("failed", text="DistBackendError: NCCL error: /dev/shm/nccl-x: No space left on device"),
        code=1,
    ),
    rank(1, *BEGINNING, step("unfinished", stack=WAITING), ending="terminated", code=143),
)
NOBODY = comm(rank(0, ending="never-started", code=None), rank(1, ending="never-started", code=None))
ELSEWHERE = comm(
    *NOBODY.comm.ranks,
    master_addr="192.0.2.1",
    resolution=Resolution(name="192.0.2.1", addresses=("192.0.2.1",), local=False),
)
PORT = comm(master_port=29500, port_taken="port 29500: [Errno 98] Address already in use; held by process 7 (python)")
PORT_AT_START = comm(
    *NOBODY.comm.ranks,
    master_port=29500,
    output="RuntimeError: The server socket has failed to listen on any local network address (errno: 98 - EADDRINUSE)",
)
NO_NAME = comm(master_addr="node0", resolution=Resolution(name="node0", error="[Errno -2] Name or service not known"))
C10D_NAME = failed(
    "torch.distributed.DistNetworkError",
    "The client socket has failed to connect to any network address of (node7, 29500). The IPv6 network addresses of "
    "(node7, 29500) cannot be retrieved (gai error: -2 - Name or service not known).",
)
C10D_CONNECT = failed(
    "torch.distributed.DistNetworkError",
    "The client socket has timed out after 60000ms while trying to connect to (10.0.0.7, 29500).",
)
EADDRINUSE = failed(
    "torch.distributed.DistNetworkError",
    "The server socket has failed to listen on any local network address. port: 29501, useIpv6: false, code: -98, "
    "name: EADDRINUSE, message: address already in use",
)
USERS_OWN = failed("ValueError", "the port of the wine is in the cellar, its address too")
DISK_FULL = failed("OSError", "[Errno 28] No space left on device: '/data/checkpoint/model.pt'")
WORKER_BUS_ERROR = failed(
    "RuntimeError",
    "DataLoader worker (pid 4242) is killed by signal: Bus error. It is possible that dataloader's workers are out of "
    "shared memory. Please try to raise your shared memory limit.",
)

POSITIVE: dict[str, list[Case]] = {
    "launch/port-in-use": [PORT, PORT_AT_START, EADDRINUSE],
    "comm/name-resolution": [NO_NAME, C10D_NAME],
    "comm/missing-rank": [MISSING],
    "comm/stalled-rank": [STALLED, STOPPED, DIED],
    "comm/unreachable": [ALL_WAIT, ELSEWHERE, C10D_CONNECT],
    "comm/wrong-value": [WRONG],
    "comm/failed-step": [OUT_OF_MEMORY, NOBODY],
    "memory/shm-exhausted": [BUS_ERROR, NO_SHM, WORKER_BUS_ERROR, job(RankRun(rank=0, exit_code=-7), outcome="killed")],
}
_TROUBLE = [MISSING, STALLED, STOPPED, DIED, ALL_WAIT, WRONG, OUT_OF_MEMORY, NO_SHM, BUS_ERROR, NOBODY, ELSEWHERE]
_CALM = [Case(), HEALTHY, ABORTED_AFTER_WORK, USERS_OWN, DISK_FULL]


def _all_but(*own: Case) -> list[Case]:
    """Every other trouble of the check: one root, one diagnosis."""
    return [*_CALM, *(case for case in (*_TROUBLE, PORT, PORT_AT_START, NO_NAME) if case not in own)]


NEGATIVE: dict[str, list[Case]] = {
    "launch/port-in-use": [*_all_but(PORT, PORT_AT_START), C10D_CONNECT],
    "comm/name-resolution": [*_all_but(NO_NAME), C10D_CONNECT, EADDRINUSE],
    "comm/missing-rank": _all_but(MISSING),
    "comm/stalled-rank": _all_but(STALLED, STOPPED, DIED),
    "comm/unreachable": [*_all_but(ALL_WAIT, ELSEWHERE), C10D_NAME, EADDRINUSE],
    "comm/wrong-value": _all_but(WRONG),
    "comm/failed-step": _all_but(OUT_OF_MEMORY, NOBODY),
    "memory/shm-exhausted": [*_all_but(NO_SHM, BUS_ERROR), job(RankRun(rank=0, exit_code=-7, completed=True))],
}


@pytest.mark.parametrize(("identifier", "case"), [(i, c) for i, cases in POSITIVE.items() for c in cases])
def test_positive(identifier, case):
    (finding,) = found(case, identifier)
    assert finding.severity == "error"
    assert finding.evidence
    assert finding.cause


@pytest.mark.parametrize(("identifier", "case"), [(i, c) for i, cases in NEGATIVE.items() for c in cases])
def test_negative(identifier, case):
    assert found(case, identifier) == []


def test_the_sentence_names_rank_step_and_process():
    (stopped,) = found(STOPPED, "comm/stalled-rank")
    assert (
        stopped.cause == "rank 1 was stopped by a signal (process 101 is in state T) while the other ranks wait for it"
    )
    assert "kill -CONT 101" in stopped.fixes[0].text
    (died,) = found(DIED, "comm/stalled-rank")
    assert died.cause == "rank 1 died in all_reduce (bf16) (signal 9) while the other ranks wait for it"
    (stalled,) = found(STALLED, "comm/stalled-rank")
    assert "time.sleep(600)" in stalled.evidence[0].text


def test_the_size_of_shared_memory_is_shown_with_it():
    case = Case(comm=BUS_ERROR.comm, machine=MachineFacts(shm_total=64 << 20))
    (finding,) = found(case, "memory/shm-exhausted")
    assert finding.evidence[-1].text == "/dev/shm has 64.0 MiB"


def test_a_passed_check_says_nothing():
    assert ABORTED_AFTER_WORK.comm.passed
    for identifier in POSITIVE:
        assert found(HEALTHY, identifier) == []
