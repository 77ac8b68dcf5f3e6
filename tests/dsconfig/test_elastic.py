"""Elastic training's arithmetic against what DeepSpeed 0.16.4 answered (`compute_elastic_config`, world size given)."""

import pytest

from dsdoctor.dsconfig.elastic import NotElastic, enabled, plan

LARGER = {"max_train_batch_size": 2000}
SMALLER = {"max_train_batch_size": 100}
RECORDED = [  # section, ranks, batch size and micro batch of DeepSpeed 0.16.4
    ({"max_train_batch_size": 2000, "micro_batch_sizes": [2, 4, 6], "version": 0.1}, 8, (1680, 6)),
    ({"max_train_batch_size": 2000, "micro_batch_sizes": [2, 4, 6], "version": 0.1, "max_gpus": 4}, 3, (1680, 4)),
    (
        {"max_train_batch_size": 100, "micro_batch_sizes": [3, 8], "version": 0.1, "prefer_larger_batch": False},
        4,
        (72, 3),
    ),
    ({"max_train_batch_size": 64, "micro_batch_sizes": [16], "version": 0.1}, 4, (64, 16)),
    ({"max_train_batch_size": 2000, "micro_batch_sizes": [2, 4], "num_gpus_per_node": 8}, 16, (1920, 4)),
    (
        {"max_train_batch_size": 2000, "micro_batch_sizes": [1, 6], "num_gpus_per_node": 4, "model_parallel_size": 2},
        12,
        (1680, 1),
    ),
    ({"max_train_batch_size": 100, "micro_batch_sizes": [4], "num_gpus_per_node": 4, "max_gpus": 4}, 12, (96, 4)),
]
REFUSED = [  # DeepSpeed 0.16.4 raises for these
    {"micro_batch_sizes": [2]},
    {"max_train_batch_size": 8, "micro_batch_sizes": 2},
    {"max_train_batch_size": 8, "micro_batch_sizes": [0]},
    {"max_train_batch_size": 8, "micro_batch_sizes": [16], "version": 0.1},
    {"max_train_batch_size": 8, "micro_batch_sizes": [2], "min_gpus": 0},
    {"max_train_batch_size": 8, "micro_batch_sizes": [2], "min_gpus": 4, "max_gpus": 2},
    {"max_train_batch_size": 8, "micro_batch_sizes": [2], "min_time": -1},
    {"max_train_batch_size": 8, "micro_batch_sizes": [2], "version": 0.3},
    {"max_train_batch_size": 8, "micro_batch_sizes": [2], "version": 0.1, "model_parallel_size": 2},
    {"max_train_batch_size": 8, "micro_batch_sizes": [2], "model_parallel_size": 2, "num_gpus_per_node": 3},
]


@pytest.mark.parametrize(("section", "ranks", "answer"), RECORDED)
def test_as_deepspeed_answers(section, ranks, answer):
    found = plan(section, ranks)
    assert (found.train, found.micro) == answer
    assert ranks in found.counts


def test_a_number_of_ranks_that_is_not_allowed():
    found = plan({"max_train_batch_size": 2000, "micro_batch_sizes": [2, 4, 6], "version": 0.1}, 11)
    assert found.micro is None
    assert 12 in found.counts
    assert 11 not in found.counts


@pytest.mark.parametrize("section", REFUSED)
def test_what_deepspeed_refuses(section):
    with pytest.raises(NotElastic):
        plan(section, 2)


def test_only_a_section_that_is_switched_on():
    assert enabled({"elasticity": {"enabled": True}})
    assert not enabled({"elasticity": {"enabled": False}})
    assert not enabled({"elasticity": True})
