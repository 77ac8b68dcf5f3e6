"""Bandwidths and what is slow among its like, by hand-made figures."""

import pytest

from dsdoctor.comm.speeds import Speeds, speeds


def measured(what: str, size: int, seconds: float) -> dict:
    return {"event": "measured", "what": what, "bytes": size, "seconds": seconds}


def test_bus_bandwidth_is_the_usual_one():
    """8 ranks, 1 GB in 0.01 s: 100 GB/s of the algorithm; all_reduce moves 2·7/8 of that, a gather 7/8."""
    figures = [
        measured("all_reduce", 10**9, 0.01),
        measured("all_gather", 10**9, 0.01),
        measured("broadcast", 10**9, 0.01),
    ]
    found = speeds([figures] * 8, ["a"] * 8)
    assert {one.collective: one.bus / 1e9 for one in found.collectives} == pytest.approx(
        {"all_reduce": 175.0, "all_gather": 87.5, "broadcast": 100.0}
    )


def test_the_slowest_rank_counts():
    found = speeds([[measured("broadcast", 100, 1.0)], [measured("broadcast", 100, 4.0)]], ["a", "a"])
    assert found.collectives[0].seconds == 4.0


def test_pairs_know_whether_they_cross_nodes():
    found = speeds([[measured("pair 0-1", 100, 1.0), measured("pair 0-2", 100, 2.0)], [], []], ["a", "a", "b"])
    assert [(pair.low, pair.high, pair.bandwidth, pair.across) for pair in found.pairs] == [
        (0, 1, 100.0, False),
        (0, 2, 50.0, True),
    ]


def test_nothing_was_measured():
    assert speeds([[{"event": "hello"}], []], ["a", "b"]) is None


def test_slow_ranks_against_the_middle():
    assert Speeds(compute={0: 1.0, 1: 1.1, 2: 2.0, 3: 0.9}).slow_ranks() == ((2, pytest.approx(2.0 / 1.05)),)
    assert Speeds(compute={0: 1.0, 1: 9.0}).slow_ranks() == ()  # of two nobody knows which is the odd one
