"""The ranks that share a batch, by the rules of `DeepSpeedConfig.__init__` (asked itself in `test_in_the_wild`)."""

import pytest

from dsdoctor.dsconfig.parallel import grid


@pytest.mark.parametrize(
    ("config", "more", "ranks"),
    [
        ({}, {}, (8,)),
        ({"tensor_parallel": {"autotp_size": 2}}, {}, (8, 4)),
        ({"tensor_parallel": {"autotp_size": 0}}, {}, (8,)),
        ({"sequence_parallel_size": 4}, {}, (2,)),
        ({"sequence_parallel_size": 4}, {"release": "0.16.4"}, (8,)),
        ({"sequence_parallel_size": 4, "data_parallel_size": 2}, {}, (2,)),
        ({"data_parallel_size": 2}, {}, (8,)),
        ({"sequence_parallel_size": "4"}, {}, (8,)),
        ({}, {"stages": 4}, (2,)),
    ],
)
def test_ranks(config, more, ranks):
    assert grid(config, 8, **more).ranks == ranks


@pytest.mark.parametrize(
    ("config", "more"),
    [
        ({"sequence_parallel_size": 3}, {}),
        ({"tensor_parallel": {"autotp_size": 3}}, {}),
        ({"sequence_parallel_size": 2, "data_parallel_size": 2}, {}),
        ({}, {"stages": 3}),
    ],
)
def test_sizes_that_do_not_fit_the_world(config, more):
    told = grid(config, 8, **more)
    assert told.ranks == ()
    assert "8 ranks" in told.problem


def test_a_size_below_one():
    assert "below 1" in grid({"sequence_parallel_size": -0.5}, 8).problem
