"""The formulas against bytes for a parameter that were measured on DeepSpeed 0.19.8.

Measured: a stack of eight linear layers with 8.4 M parameters, two ranks, torch's Adam, buckets near zero, one
micro-step; the live storages counted after a boundary backward once the optimizer states exist. GPU and CPU shares are
added up.
"""

import pytest

from dsdoctor.memory import host, moments, terms
from dsdoctor.memory.inventory import Inventory
from dsdoctor.memory.parameter import Parameter
from dsdoctor.memory.setup import Setup, setup_of

P = 8_400_000
BF16 = {"bf16": {"enabled": True}}
ACCUMULATE_FP32 = {"data_types": {"grad_accum_dtype": "fp32"}}
LOW = {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}


def stack(elements: int, layers: int, *, trainable: int | None = None) -> Inventory:
    """Equal layers, of which the first ones are trained up to that many elements."""
    each = elements // layers
    trained = (elements if trainable is None else trainable) // each
    return Inventory(parameters=tuple(Parameter(f"{i}.weight", each, i < trained) for i in range(layers)))


MODEL = stack(P, 8)


def setup(config: dict, stage: int, *, device: str = "cpu", ranks: int = 2, model: Inventory = MODEL, **zero) -> Setup:
    full = {"optimizer": {"type": "AdamW"}, **config, "zero_optimization": {"stage": stage, **zero}}
    return setup_of(full, model, release="0.19.8", device=device, ranks=ranks, ranks_per_host=ranks)


def kept(one: Setup) -> float:
    """Bytes for a parameter that one rank holds at the end of backward, on its device and on the host."""
    device = moments.end_of_backward(one)
    buckets = terms.bucket(one) if one.stage == 3 else 0
    there = host.held(one)
    return (device.total - device.overhead - buckets + (there.total - there.overhead) / one.ranks_per_host) / P


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
    assert terms.bucket(setup(BF16, 2, device="cuda")) == 2 * 500_000_000
    assert terms.bucket(setup(BF16, 2, device="cuda", overlap_comm=True)) == 2 * 2 * 500_000_000
    assert terms.bucket(setup(BF16, 3, device="cuda", overlap_comm=True)) == 2 * 500_000_000
    assert terms.bucket(setup({}, 1, device="cuda", reduce_bucket_size=1000)) == 4 * 1000


def test_pages_of_a_bucket_that_nobody_writes_take_no_memory_on_the_cpu():
    assert terms.bucket(setup(BF16, 2)) == 2 * P


def test_pinned_blocks_are_rounded_up_to_powers_of_two():
    """1000 elements on one rank: the fp32 gradient of 4000 B takes 4096, the 16-bit flat buffer of 2000 B 2048."""
    small = stack(1000, 10)
    pinned = setup(BF16, 3, device="cuda", ranks=1, model=small, offload_optimizer=CPU)
    pageable = setup(
        BF16, 3, device="cuda", ranks=1, model=small, offload_optimizer={"device": "cpu", "pin_memory": False}
    )
    assert host.gradients(pinned) == 4096 + 2048
    assert host.gradients(pageable) == 4000 + 2000


def test_older_releases_do_not_pin_by_default():
    config = {"zero_optimization": {"stage": 3, "offload_optimizer": CPU}}
    made = [
        setup_of(config, MODEL, release=release, device="cuda", ranks=1, ranks_per_host=1)
        for release in ("0.19.4", "0.19.5")
    ]
    assert [one.pinned for one in made] == [False, True]


def test_frozen_parameters_cost_only_their_weights():
    lora = stack(P, 100, trainable=P // 100)
    one = setup(BF16, 2, model=lora)
    assert terms.weights(one) == 2 * P
    assert terms.gradients(one) + terms.master(one) + terms.states(one) == (2 + 4 + 8) * (P // 100) // 2


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


def test_parameters_of_stage_3_are_cut_one_by_one_and_rounded_up():
    """Three parameters of 5 elements on 2 ranks: 3 elements of each on every rank, where 15 / 2 would be 8."""
    model = Inventory(parameters=tuple(Parameter(f"{i}.weight", 5) for i in range(3)))
    one = setup(BF16, 3, model=model, stage3_param_persistence_threshold=0)
    assert one.weight_shard == 9
    assert setup(BF16, 2, model=model).trained_shard == 8


def test_small_parameters_stay_whole_at_stage_3():
    """Up to the threshold of 1e5 elements each, beside their shards; up to the model's threshold together."""
    model = Inventory(
        parameters=(Parameter("big.weight", 1_000_000), Parameter("a.bias", 600), Parameter("b.bias", 500))
    )
    assert terms.persistent(setup(BF16, 3, model=model)) == 2 * 1100
    assert terms.persistent(setup(BF16, 3, model=model, stage3_model_persistence_threshold=700)) == 2 * 600
    assert terms.persistent(setup(BF16, 3, model=model, ranks=1)) == 0


def test_hpz_holds_a_second_shard_within_the_host():
    one = setup(BF16, 3, ranks=8, zero_hpz_partition_size=4)
    assert terms.secondary(one) == 2 * P // 4


def test_experts_are_sharded_among_the_ranks_that_share_them():
    """8 ranks, expert parallelism of 4: an expert's shards are spread over 2 ranks, the dense part over 8."""
    parts = (Parameter("dense.weight", 8000), Parameter("mlp.experts.up", 4000, True, 4.0, True))
    model = Inventory(parameters=parts, expert_parallel=4)
    one = setup(BF16, 3, ranks=8, model=model)
    assert one.weight_shard == 8000 // 8 + 4000 // 2
    assert terms.master(one) == 4 * (1000 + 2000)


def test_nvme_takes_masters_states_and_gradients():
    one = setup(BF16, 3, device="cuda", ranks=8, offload_optimizer={"device": "nvme", "nvme_path": "/x"})
    assert host.nvme(one) == (4 + 8 + 4) * P


def test_sub_groups_end_once_they_have_reached_their_size():
    """Elements of one of 2 ranks: 4, 6, 10 and 2 in groups of 8 are 4 + 6, 10 and 2."""
    model = Inventory(parameters=tuple(Parameter(f"{i}.w", 2 * size) for i, size in enumerate((4, 6, 10, 2))))
    assert model.largest_group(8, 2) == 10
    assert model.largest_group(11, 2) == 20
    assert model.largest_group(10**9, 2) == 22


def test_forward_of_a_later_micro_step_has_the_gradients_of_the_earlier():
    def forward(stage: int, steps: int) -> int:
        one = setup(BF16 | {"gradient_accumulation_steps": steps}, stage, reduce_bucket_size=1000)
        return next(
            moment.holding.gradients for moment in moments.device_moments(one) if moment.name == moments.FORWARD
        )

    assert [forward(1, 1), forward(1, 2)] == [0, 2 * P]
    assert [forward(2, 1), forward(2, 2)] == [0, 2 * P // 2]
