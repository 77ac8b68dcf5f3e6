"""The tables of the communication check, from hand-made results."""

from dsdoctor.comm.facts import CommFacts, CommRank, CommStep, RankGpu
from dsdoctor.comm.interfaces import Interface
from dsdoctor.comm.members import Member
from dsdoctor.comm.nccl_log import NcclSummary
from dsdoctor.comm.speeds import PairSpeed, Speeds
from dsdoctor.machine.interconnect import Way
from dsdoctor.report import comm

GIB = 1 << 30
DONE = (CommStep(name="goodbye", status="passed"),)
NVLINK = Way(name="NVLink (NV12)", best=300e9)


def member(rank: int, **values) -> Member:
    known = {
        "rank": rank,
        "local_rank": rank % 2,
        "world_size": 4,
        "host": f"node{rank // 2}",
        "launcher": "srun",
        "interface": Interface(name="eth0", addresses=("10.0.0.1",)),
        "versions": {"python": "3.11.7", "torch": "2.13.0"},
        "config_hash": "abc",
    }
    return Member(**known | values)


def text(**values) -> str:
    ranks = tuple(CommRank(rank=rank, host=f"node{rank // 2}", steps=DONE) for rank in range(4))
    return "\n".join(comm.lines(CommFacts(**{"world_size": 4, "ranks": ranks, **values})))


def test_the_odd_ones_out_stand_beside_what_most_have():
    others = {"versions": {"python": "3.11.7", "torch": "2.1.0"}}
    shown = text(members=(*(member(rank) for rank in range(3)), member(3, **others)))
    rows = [line.split() for line in shown.splitlines()]
    assert ["python", "3.11.7"] in rows
    assert ["ds_config", "abc"] in rows
    assert "  torch      2.13.0  2.1.0 on 1 of 4 ranks" in shown.splitlines()


def test_an_interface_that_is_none_of_the_usual_is_marked():
    docker = Interface(name="docker0", addresses=("172.17.0.1",), kind="virtual")
    assert "docker0 (virtual)" in text(members=(member(0, interface=docker),))


def test_free_memory_of_gpus_where_there_are_any():
    gpu = RankGpu(uuid="", free_bytes=79 * GIB, total_bytes=80 * GIB)
    assert "79.0 GiB of 80.0 GiB" in text(members=(member(0),), ranks=(CommRank(rank=0, gpu=gpu),))
    assert "GPU memory" not in text(members=(member(0),))


def test_links_beside_what_they_should_give():
    def pair(low: int, high: int, bandwidth: float, way: Way | None, across: bool) -> PairSpeed:
        return PairSpeed(low=low, high=high, bandwidth=bandwidth, across=across, way=way)

    pairs = (
        pair(0, 1, 250e9, NVLINK, False),
        pair(2, 3, 200e9, NVLINK, False),
        pair(0, 2, 1e9, Way(name="TCP (eth0)"), True),
        pair(0, 3, 3e9, None, True),
    )
    shown = [line.split("  ") for line in text(speeds=Speeds(pairs=pairs)).splitlines()]
    cells = [[cell.strip() for cell in line if cell.strip()] for line in shown]
    assert ["inside a node", "NVLink (NV12)", "300.0 GB/s", "200.0 GB/s", "250.0 GB/s"] in cells
    assert ["between nodes", "TCP (eth0)", "not known", "1.0 GB/s", "1.0 GB/s"] in cells
    assert ["between nodes", "not known", "not known", "3.0 GB/s", "3.0 GB/s"] in cells


def test_the_map_of_pairs_is_coloured_from_the_slowest_to_the_fastest():
    figures = {(0, 1): 1e9, (0, 2): 9e9, (1, 2): 5e9}
    pairs = tuple(PairSpeed(low=i, high=k, bandwidth=b, across=False) for (i, k), b in figures.items())
    (page,) = [one for one in comm.sections(CommFacts(world_size=3, speeds=Speeds(pairs=pairs))) if "pairs of" in one]
    assert '<td style="background:hsl(0 70% 50% / .5)">1.00</td>' in page
    assert '<td style="background:hsl(120 70% 50% / .5)">9.00</td>' in page


RAS = "Errors\n======\n\nINCOMPLETE\n  Process 3487984 on node 172.16.64.213 managing GPU 5\n\nWarnings\n========\n\n"


def test_what_nccl_said_of_the_job_is_told_once():
    ranks = tuple(CommRank(rank=rank, ras=RAS) for rank in range(3))
    shown = text(ranks=ranks)
    assert shown.count("Process 3487984 on node 172.16.64.213 managing GPU 5") == 1
    assert "no error" in text(ranks=(CommRank(rank=0, ras="Errors\n======\n\nWarnings\n========\n"),))
    assert "RAS" not in text()


def test_what_nccl_logged_stands_beside_the_check_or_alone():
    summary = NcclSummary()
    assert list(comm.lines(None, summary)) == []
    summary.feed(b"node0:1:2 [0] NCCL INFO Using network Socket\n")
    assert list(comm.lines(None, summary)) == ["", "what NCCL logged", "  network  Socket"]
    (section,) = comm.sections(None, summary)
    assert "<td>Socket</td>" in section
