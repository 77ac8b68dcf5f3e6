"""The formulas against bytes for a parameter that were measured on DeepSpeed 0.19.8.

Measured: a stack of eight linear layers with 8.4 M parameters, two ranks, torch's Adam, buckets near zero, one
micro-step; the live storages counted after a boundary backward once the optimizer states exist. GPU and CPU shares are
added up.
"""

import pytest

from dsdoctor.memory import terms
from dsdoctor.memory.setup import Setup, setup_of
from dsdoctor.runs.facts import ModelFacts

P = 8_400_000
MODEL = ModelFacts(class_name="Stack", parameters=P, trainable=P, largest_layer=P // 8, dtypes=(("torch.float32", P),))
BF16 = {"bf16": {"enabled": True}}
ACCUMULATE_FP32 = {"data_types": {"grad_accum_dtype": "fp32"}}
LOW = {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}


def setup(config: dict, stage: int, *, device: str = "cpu", ranks: int = 2, model: ModelFacts = MODEL, **zero) -> Setup:
    full = {"optimizer": {"type": "AdamW"}, **config, "zero_optimization": {"stage": stage, **zero}}
    return setup_of(full, model, release="0.19.8", device=device, ranks=ranks, ranks_per_host=ranks)


def kept(one: Setup) -> float:
    """Bytes for a parameter that one rank holds, on its device and on the host."""
    device = terms.weights(one) + terms.gradients(one) + terms.optimizer(one)
    host = terms.host_weights(one) + terms.host_gradients(one) + terms.host_optimizer(one) + terms.host_buffers(one)
    return (device + host / one.ranks_per_host) / P


CPU = {"device": "cpu"}


@pytest.mark.parametrize(
    ("config", "stage", "zero", "measured"),
    [
        ({}, 0, {}, 16),
        (BF16, 0, {}, 16),
        (BF16, 1, {}, 9),
        (BF16, 2, {}, 9),
        ({}, 1, {}, 12),
        ({}, 2, {}, 12),
        (BF16 | ACCUMULATE_FP32, 2, {}, 10),
        (BF16 | ACCUMULATE_FP32, 1, {}, 14),
        (LOW, 2, {}, 6),
        (BF16, 3, {}, 8),
        (BF16 | ACCUMULATE_FP32, 3, {}, 9),
        ({}, 3, {}, 10),
        (LOW, 3, {}, 5),
        (BF16, 1, {"offload_optimizer": CPU}, 11.5),
        (BF16, 2, {"offload_optimizer": CPU}, 11.5),
        (BF16 | {"gradient_accumulation_steps": 2}, 2, {"offload_optimizer": CPU}, 12.5),
        (BF16, 3, {"offload_optimizer": CPU}, 10),
        (BF16, 3, {"offload_optimizer": CPU, "offload_param": CPU}, 10),
    ],
)
def test_measured_bytes_for_a_parameter(config, stage, zero, measured):
    assert kept(setup(config, stage, **zero)) == pytest.approx(measured, abs=0.01)


def test_bucket_has_its_size_whatever_the_model_has():
    """`torch.empty(reduce_bucket_size)` of 16-bit elements; twice with overlap_comm below stage 3."""
    assert terms.buffers(setup(BF16, 2, device="cuda")) == 2 * 500_000_000
    assert terms.buffers(setup(BF16, 2, device="cuda", overlap_comm=True)) == 2 * 2 * 500_000_000
    assert terms.buffers(setup(BF16, 3, device="cuda", overlap_comm=True)) == 2 * 500_000_000
    assert terms.buffers(setup({}, 1, device="cuda", reduce_bucket_size=1000)) == 4 * 1000


def test_pages_of_a_bucket_that_nobody_writes_take_no_memory_on_the_cpu():
    assert terms.buffers(setup(BF16, 2)) == 2 * P


def test_pinned_blocks_are_rounded_up_to_powers_of_two():
    """1000 elements on one rank: the fp32 gradient of 4000 B takes 4096, the 16-bit flat buffer of 2000 B 2048."""
    small = ModelFacts(class_name="M", parameters=1000, trainable=1000, largest_layer=10)
    pinned = setup(BF16, 3, device="cuda", ranks=1, model=small, offload_optimizer=CPU)
    pageable = setup(
        BF16, 3, device="cuda", ranks=1, model=small, offload_optimizer={"device": "cpu", "pin_memory": False}
    )
    assert terms.host_gradients(pinned) == 4096 + 2048
    assert terms.host_gradients(pageable) == 4000 + 2000


def test_older_releases_do_not_pin_by_default():
    config = {"zero_optimization": {"stage": 3, "offload_optimizer": CPU}}
    made = [
        setup_of(config, MODEL, release=release, device="cuda", ranks=1, ranks_per_host=1)
        for release in ("0.19.4", "0.19.5")
    ]
    assert [one.pinned for one in made] == [False, True]


def test_frozen_parameters_cost_only_their_weights():
    lora = ModelFacts(class_name="L", parameters=P, trainable=P // 100, largest_layer=1)
    one = setup(BF16, 2, model=lora)
    assert terms.weights(one) == 2 * P
    assert terms.gradients(one) + terms.optimizer(one) == (2 + 4 + 8) * (P // 100) // 2


def test_optimizer_states():
    def states(optimizer: dict | None) -> int:
        config = {"zero_optimization": {"stage": 1}} | ({"optimizer": optimizer} if optimizer else {})
        return setup_of(config, MODEL, release="", device="cpu", ranks=1, ranks_per_host=1).states

    assert states({"type": "AdamW"}) == 8
    assert states({"type": "SGD", "params": {"lr": 1}}) == 0
    assert states({"type": "SGD", "params": {"momentum": 0.9}}) == 4
    assert states({"type": "Lion"}) == 4
    assert states(None) == 8  # not known: counts as Adam


def test_offload_of_parameters_below_stage_3_does_nothing():
    assert setup(BF16, 2, offload_param=CPU).offload_param == "none"
    assert setup(BF16, 0, offload_optimizer=CPU).offload_optimizer == "none"
