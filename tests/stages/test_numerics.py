"""The config of a run on whole weights, as the replay of a bundle and the planting of faults need it."""

import pytest

from dsdoctor.stages.numerics import whole


@pytest.mark.parametrize(
    ("given", "changed"),
    [
        ({"zero_optimization": {"stage": 3, "overlap_comm": True}}, {"zero_optimization": {"stage": 0}}),
        ({"zero_optimization": {"stage": 2}}, {"zero_optimization": {"stage": 2}}),
        (
            {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4},
            {"train_micro_batch_size_per_gpu": 4},
        ),
        (
            {"train_batch_size": 64, "gradient_accumulation_steps": 4},
            {"train_batch_size": 4, "gradient_accumulation_steps": 4},
        ),
        ({"train_batch_size": "auto"}, {"train_batch_size": "auto"}),
    ],
)
def test_weights_are_whole_and_the_batch_fits_one_rank(given, changed):
    before = repr(given)
    assert whole(given, ranks=1) == changed
    assert repr(given) == before
