"""Which link joins two ranks: hand-made nodes."""

import pytest

from dsdoctor.comm.facts import CommRank, RankGpu
from dsdoctor.comm.interfaces import Interface
from dsdoctor.comm.members import Member
from dsdoctor.comm.ways import Ways
from dsdoctor.machine.interconnect import GpuLinks, Way

LINKS = GpuLinks(gpus={"g0": 0, "g1": 1}, ways={(0, 1): "NV4"}, nvlink={0: 25e9, 1: 25e9})
RANKS = [
    CommRank(rank=rank, host=f"node{rank // 2}", gpu=RankGpu(uuid=f"g{rank % 2}", free_bytes=1, total_bytes=1))
    for rank in range(4)
]


def member(rank: int, speed: float | None = 1.25e9, **ports: float) -> Member:
    interface = Interface(name="eth0", speed=speed)
    place = {"rank": rank, "local_rank": rank % 2, "world_size": 4, "host": f"node{rank // 2}", "launcher": "srun"}
    return Member(**place, interface=interface, ports=ports)


def ways(backend: str, members: list[Member]) -> Ways:
    return Ways(backend=backend, ranks=RANKS, members=members, gpu_links={"node0": LINKS})


WITH_CARDS = [member(0, mlx5_0=25e9, mlx5_1=12.5e9), *(member(rank, mlx5_0=50e9) for rank in (1, 2, 3))]
PLAIN = [member(rank) for rank in range(4)]


@pytest.mark.parametrize(
    ("backend", "members", "pair", "expected"),
    [
        ("nccl", PLAIN, (0, 1), Way(name="NVLink (NV4)", best=100e9)),
        ("nccl", PLAIN, (2, 3), None),  # its node did not say
        ("nccl", WITH_CARDS, (0, 2), Way(name="InfiniBand or RoCE (mlx5_0, mlx5_1)", best=25e9)),
        ("nccl", PLAIN, (0, 2), Way(name="TCP (eth0)", best=1.25e9)),
        ("gloo", WITH_CARDS, (0, 2), Way(name="TCP (eth0)", best=1.25e9)),
        ("gloo", [member(rank, speed=None) for rank in range(4)], (0, 2), Way(name="TCP (eth0)")),
        ("gloo", [], (0, 2), None),
        ("gloo", PLAIN, (0, 1), Way(name="the kernel and memory (gloo)")),  # no figure is made up for that
    ],
)
def test_between(backend, members, pair, expected):
    assert ways(backend, members).between(*pair) == expected
