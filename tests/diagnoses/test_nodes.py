"""Nodes that cannot connect, disagree, or are slow: hand-made results of a check on several nodes."""

from dataclasses import replace

import pytest

from dsdoctor.case import Case
from dsdoctor.comm.facts import CommFacts, CommRank, CommStep, Experiment, Resolution
from dsdoctor.comm.interfaces import Interface
from dsdoctor.comm.links import Link
from dsdoctor.comm.meeting import NO_STORE
from dsdoctor.comm.members import Member
from dsdoctor.comm.speeds import PairSpeed, Speeds
from dsdoctor.machine.facts import MachineFacts
from dsdoctor.machine.interconnect import Way
from tests.diagnoses.examples import found

ETH = Interface(name="eth0", addresses=("10.0.0.1",))
LO = Interface(name="lo", addresses=("127.0.1.1",), kind="loopback")
DOCKER = Interface(name="docker0", addresses=("172.17.0.1",), kind="virtual", forced_by="GLOO_SOCKET_IFNAME=docker0")
MET = (CommStep(name="import", status="passed"), CommStep(name="rendezvous", status="passed"))


def member(number: int, /, **values) -> Member:
    known = {"master": ("10.0.0.1",), "interface": ETH, "route": ETH, "versions": {"torch": "2.13.0"}}
    place = {"rank": number, "local_rank": number % 2, "host": f"node{number // 2}"}
    return Member(**{**place, "world_size": 4, "launcher": "srun"} | known | values)


def nodes(changed: dict[int, dict] | None = None, **facts) -> Case:
    """Two nodes of two ranks that passed, but for what is changed."""
    everyone = tuple(member(rank, **(changed or {}).get(rank, {})) for rank in range(4))
    steps = (*MET, CommStep(name="goodbye", status="passed"))
    ranks = tuple(CommRank(rank=rank, host=f"node{rank // 2}", exit_code=0, steps=steps) for rank in range(4))
    values = {"world_size": 4, "members": everyone, "ranks": ranks, "master_addr": "node0", "master_port": 29500}
    here = Resolution(name="node0", addresses=("10.0.0.1",), local=True)
    return Case(comm=CommFacts(**values | {"resolution": here} | facts))


def alone(error: str, on: str = "node0", **values) -> Case:
    """What rank 2 knows that could not meet the others; `on` is MASTER_ADDR."""
    elsewhere = Resolution(name="node0", addresses=("10.0.0.1",), local=False)
    one = (member(2, **values),)
    return nodes(members=one, ranks=(), seen_by=2, cannot_meet=error, resolution=elsewhere, master_addr=on)


def broken(source: int, target: int, error: str = "no answer within 5 s") -> Link:
    return Link(source=source, target=target, address="10.0.0.2", error=error)


def pairs(way: Way | None = None, *, across: bool = False, **slow: float) -> Speeds:
    """Six pairs of 10 GB/s, with other figures for some: `p01=1e9`."""
    names = [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
    figures = {(low, high): slow.get(f"p{low}{high}", 10e9) for low, high in names}
    found = (PairSpeed(low=i, high=k, bandwidth=b, across=across, way=way) for (i, k), b in figures.items())
    return Speeds(pairs=tuple(found))


def computes(*seconds: float) -> Speeds:
    return Speeds(compute=dict(enumerate(seconds)))


HEALTHY = nodes()
ONE_WAY = nodes(ranks=(), broken_links=(broken(0, 2),))
BOTH_WAYS = nodes(ranks=(), broken_links=(broken(0, 2), broken(2, 0)))
ON_DOCKER = nodes({2: {"interface": DOCKER}}, ranks=(), broken_links=(broken(0, 2, "Connection refused"),))
ON_LOOPBACK = nodes({2: {"interface": LO}}, ranks=(), broken_links=(broken(0, 2, "Connection refused"),))
MASTER_IS_LOOPBACK = alone("connecting to node0:29500: Connection refused", master=("127.0.1.1",))
LOOPBACK_GIVEN = alone("no answer", master=("127.0.0.1",), on="127.0.0.1")
NO_ANSWER = alone("connecting to node0:29500: no answer within 30 s")
REFUSED = alone("connecting to node0:29500: Connection refused")
STRANGER = alone(f"node0:29500 {NO_STORE} within 30 s")
OTHER_SIZE = nodes({2: {"world_size": 6}, 3: {"world_size": 6}}, ranks=())
TWICE = nodes({2: {"rank": 0}, 3: {"rank": 1}}, ranks=())
OTHER_TORCH = nodes({2: {"versions": {"torch": "2.1.0"}}, 3: {"versions": {"torch": "2.1.0"}}})
OTHER_CONFIG = nodes({rank: {"config_hash": "abc" if rank < 3 else "def"} for rank in range(4)})
FAILED = nodes().comm.ranks[:1] + tuple(replace(rank, ending="gave-up", steps=MET) for rank in nodes().comm.ranks[1:])
CURED_WITHOUT_P2P = nodes(
    ranks=FAILED,
    backend="nccl",
    experiments=(
        Experiment(name="NCCL without P2P", variables={"NCCL_P2P_DISABLE": "1"}, passed=True),
        Experiment(name="gloo", variables={}, passed=True),
    ),
)
CURED_WITHOUT_IB = nodes(
    ranks=FAILED,
    backend="nccl",
    experiments=(
        Experiment(name="NCCL without P2P", variables={"NCCL_P2P_DISABLE": "1"}, passed=False, problem="rank 1 silent"),
        Experiment(name="NCCL without InfiniBand", variables={"NCCL_IB_DISABLE": "1"}, passed=True),
    ),
)
ONLY_GLOO = nodes(
    ranks=FAILED,
    backend="nccl",
    experiments=(
        Experiment(name="NCCL without P2P", variables={"NCCL_P2P_DISABLE": "1"}, passed=False),
        Experiment(name="gloo", variables={}, passed=True),
    ),
)
NVLINK = Way(name="NVLink (NV12)", best=300e9)
SLOW = nodes(speeds=pairs(p03=1e9), backend="nccl")
SLOW_ACROSS = nodes(speeds=pairs(p03=1e9, across=True), backend="gloo")
NOT_BY_NVLINK = nodes(speeds=pairs(NVLINK), backend="nccl")  # ten of three hundred, on all pairs alike
UNEVEN = nodes(speeds=pairs(p03=5e9), backend="nccl")
UNEVEN_MEMORY = nodes(speeds=pairs(p03=1e9), backend="gloo")
TCP = nodes(speeds=pairs(Way(name="TCP (eth0)", best=100e9), across=True), backend="gloo")
HALF_OF_THE_LINK = nodes(speeds=pairs(Way(name="PCIe (PIX)", best=31.5e9)), backend="nccl")
LINK_NOT_KNOWN = nodes(speeds=pairs(Way(name="PCIe (?)")), backend="nccl")


def on_gpus(*devices: int | None, **facts) -> Case:
    """Ranks 0 and 1 on node0, 2 and 3 on node1; so many GPUs on the node of each."""
    return nodes({rank: {"devices": count} for rank, count in enumerate(devices)}, **{"ranks": FAILED, **facts})


ONE_GPU_FOR_TWO = on_gpus(2, 2, 1, 1)
NO_GPU_THERE = on_gpus(2, 2, 0, 0)
ENOUGH_GPUS = on_gpus(2, 2, 2, 2)
ON_CPUS = on_gpus(0, 0, 0, 0)
NOT_ASKED = on_gpus(None, None, None, None)
THROTTLED = nodes(speeds=computes(1.0, 1.05, 2.1, 0.95), device="cuda")
EVEN_GPUS = nodes(speeds=computes(1.0, 1.05, 1.4, 0.95), device="cuda")
TWO_GPUS = nodes(speeds=computes(1.0, 3.0), device="cuda")
BUSY_CPU = nodes(speeds=computes(1.0, 1.05, 2.1, 0.95), device="cpu")

POSITIVE = {
    "comm/unreachable": [ONE_WAY, BOTH_WAYS, NO_ANSWER],
    "comm/wrong-interface": [ON_DOCKER],
    "comm/name-resolution": [ON_LOOPBACK, MASTER_IS_LOOPBACK, LOOPBACK_GIVEN],
    "comm/missing-rank": [REFUSED],
    "launch/port-in-use": [STRANGER],
    "launch/world-size-mismatch": [OTHER_SIZE, TWICE],
    "version/rank-mismatch": [OTHER_TORCH, OTHER_CONFIG],
    "comm/p2p-hang": [CURED_WITHOUT_P2P],
    "comm/ib-error": [CURED_WITHOUT_IB],
    "comm/slow-link": [SLOW, SLOW_ACROSS, NOT_BY_NVLINK],
    "comm/slow-rank": [THROTTLED],
    "environment/no-device": [ONE_GPU_FOR_TWO, NO_GPU_THERE],
}
SEVERAL_LAUNCHERS_HERE = nodes({rank: {"local_rank": 0, "host": "here", "master": ("127.0.0.1",)} for rank in range(4)})
ALL_CASES = [
    HEALTHY,
    SEVERAL_LAUNCHERS_HERE,
    UNEVEN,
    UNEVEN_MEMORY,
    TCP,
    HALF_OF_THE_LINK,
    LINK_NOT_KNOWN,
    EVEN_GPUS,
    TWO_GPUS,
    BUSY_CPU,
    ENOUGH_GPUS,
    ON_CPUS,
    NOT_ASKED,
    ONLY_GLOO,
    *(case for cases in POSITIVE.values() for case in cases),
]
MANY = {"comm/wrong-interface": [ON_DOCKER, ON_LOOPBACK]}
"""A loopback is no way to other nodes either, however it was chosen."""
NEGATIVE = {
    identifier: [case for case in ALL_CASES if case not in MANY.get(identifier, cases)]
    for identifier, cases in POSITIVE.items()
}


@pytest.mark.parametrize(("identifier", "case"), [(i, c) for i, cases in POSITIVE.items() for c in cases])
def test_positive(identifier, case):
    (finding,) = found(case, identifier)
    assert finding.evidence
    assert finding.fixes


@pytest.mark.parametrize(("identifier", "case"), [(i, c) for i, cases in NEGATIVE.items() for c in cases])
def test_negative(identifier, case):
    assert found(case, identifier) == []


def test_the_sentences_name_host_rank_and_variable():
    (one_way,) = found(ONE_WAY, "comm/unreachable")
    assert one_way.cause == (
        "node0 (rank 0) cannot connect to node1 (rank 2) at 10.0.0.2: no answer within 5 s, while the other way works"
    )
    (docker,) = found(ON_DOCKER, "comm/wrong-interface")
    assert "set GLOO_SOCKET_IFNAME to eth0 on node1" in docker.fixes[0].text
    (size,) = found(OTHER_SIZE, "launch/world-size-mismatch")
    assert size.cause == "ranks 2, 3 on node1 were started for 6 ranks, the others for 4"
    (slow,) = found(SLOW, "comm/slow-link")
    assert "ranks 0 (node0) and 3 (node1) exchange 1.0 GB/s, 10.0 times less" in slow.cause
    assert slow.severity == "warning"
    (link,) = found(NOT_BY_NVLINK, "comm/slow-link")
    assert link.cause == (
        "ranks 0 (node0) and 1 (node0) exchange 10.0 GB/s, where NVLink (NV12) should give 300.0 GB/s"
    )
    (given,) = found(LOOPBACK_GIVEN, "comm/name-resolution")
    assert given.cause == "MASTER_ADDR is 127.0.0.1 on node1, which is not the node of rank 0"
    assert given.fixes[0].text == "set MASTER_ADDR to the host of rank 0, the same on all ranks"
    (few,) = found(ONE_GPU_FOR_TWO, "environment/no-device")
    assert few.cause == "node1 was given 2 ranks, and torch sees 1 GPUs there"
    assert [one.rank for one in few.evidence] == [3]
    (rank,) = found(THROTTLED, "comm/slow-rank")
    assert "rank 2 (node1) computes 2.0 times more slowly" in rank.cause  # 2.1 against 1.025


def test_a_variable_that_switches_a_link_off_is_named():
    (told,) = found(
        replace(NOT_BY_NVLINK, machine=MachineFacts(environment={"NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "0"})),
        "comm/slow-link",
    )
    assert [fix.text for fix in told.fixes if "unset" in fix.text] == [
        "unset NCCL_P2P_DISABLE, which keeps NCCL from a faster way"
    ]


def test_a_healthy_check_has_no_finding_about_nodes():
    assert [f for i in POSITIVE for f in found(HEALTHY, i)] == []
