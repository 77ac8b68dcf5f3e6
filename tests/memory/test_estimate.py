"""Rows, fit and recommendation."""

import json
from dataclasses import replace

import pytest

from dsdoctor.dsconfig import patch
from dsdoctor.machine.facts import Device, MachineFacts
from dsdoctor.memory.estimate import Use, estimate
from dsdoctor.memory.ladder import LADDER, WITH_NVME
from dsdoctor.runs.facts import ModelFacts

GIB = 1 << 30
SEVEN_B = ModelFacts(
    class_name="Big",
    parameters=7_000_000_000,
    trainable=7_000_000_000,
    largest_layer=200_000_000,
    dtypes=(("torch.bfloat16", 7_000_000_000),),
)
TINY = ModelFacts(class_name="Tiny", parameters=100_000, trainable=100_000, largest_layer=10_000)


def machine(gpu: int = 80, host: int = 1024, gpus: int = 8) -> MachineFacts:
    devices = tuple(Device(index=i, name="A100", total_bytes=gpu * GIB, free_bytes=gpu * GIB) for i in range(gpus))
    return MachineFacts(versions={"deepspeed": "0.19.8"}, memory_available=host * GIB, devices=devices)


def config(stage: int, **zero) -> dict:
    return {
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": stage, **zero},
    }


def test_known_sizes_of_a_7b_model_on_8_gpus():
    """By hand: (2 + (4 + 8) / 8) x 7e9 between the steps at stage 1; (2 + 2 + 4 + 8) / 8 x 7e9 at stage 3."""
    need = estimate(config(1), SEVEN_B, machine(), nproc_per_node=8, device="cuda").current
    assert need is not None
    assert (need.stage, need.offload_optimizer) == (1, "none")
    between = holding(need, "checkpoint save")
    assert between.weights == 14_000_000_000
    assert between.gradients + between.optimizer == 10_500_000_000
    need = estimate(config(3), SEVEN_B, machine(), nproc_per_node=8, device="cuda").current
    between = holding(need, "checkpoint save")
    assert between.weights + between.gradients + between.optimizer == 14_000_000_000


def holding(need, moment: str):
    (found,) = [one.holding for one in need.per_gpu.moments if one.name == moment]
    return found


def test_backward_of_stage_1_holds_all_gradients_and_the_bucket():
    """14e9 bytes of 16-bit gradients, and one bucket of 5e8 elements; the own part takes the place of what it held."""
    need = estimate(config(1), SEVEN_B, machine(), nproc_per_node=8, device="cuda").current
    assert need is not None
    assert need.per_gpu.peak_moment == "backward"
    more = need.per_gpu.peak - holding(need, "checkpoint save").total
    assert 15_000_000_000 <= more <= 16_750_000_000


def test_every_rank_loads_the_whole_model_on_the_host():
    need = estimate(config(3), SEVEN_B, machine(), nproc_per_node=8, device="cuda").current
    assert need is not None
    assert need.per_host.init_peak >= 8 * 14_000_000_000
    assert need.per_host.peak_moment == "loading the model"


def test_terms_add_up():
    for need in estimate(config(2), SEVEN_B, machine(), nproc_per_node=8, device="cuda").needs:
        for one in (need.per_gpu, need.per_host):
            parts = one.weights + one.gradients + one.optimizer + one.buffers + one.activations + one.overhead
            assert one.total == parts
            assert one.peak >= one.total


def test_overlap_that_the_config_leaves_to_the_stage_is_that_of_the_row():
    """On at stage 3 and off below it (`DeepSpeedZeroConfig.overlap_comm_valid`): stage 1 then holds all gradients."""

    def row(zero, stage):
        needs = estimate(config(3, **zero), SEVEN_B, machine(), nproc_per_node=8, device="cuda").needs
        return next(n for n in needs if (n.stage, n.offload_optimizer, n.offload_param) == (stage, "none", "none"))

    for unsaid in ({}, {"overlap_comm": None}, {"overlap_comm": "auto"}):
        assert holding(row(unsaid, 1), "backward").gradients >= 14_000_000_000
        assert holding(row(unsaid, 2), "backward").buffers == 2 * 500_000_000
    assert holding(row({"overlap_comm": True}, 1), "backward").gradients < 4_000_000_000
    assert holding(row({"overlap_comm": True}, 2), "backward").buffers == 2 * 2 * 500_000_000
    given = estimate(config(1), SEVEN_B, machine(), nproc_per_node=8, device="cuda").current
    assert holding(given, "backward") == holding(row({}, 1), "backward")


def test_what_fits_is_left_alone():
    facts = estimate(config(2), SEVEN_B, machine(), nproc_per_node=8, device="cuda")
    assert facts.current is not None
    assert facts.current.fits
    assert facts.recommended == facts.needs.index(facts.current)
    assert facts.patch is None


def test_the_cheapest_that_fits_is_recommended():
    facts = estimate(config(0), SEVEN_B, machine(gpu=40), nproc_per_node=8, device="cuda")
    assert facts.current is not None
    assert facts.current.fits is False
    best = facts.needs[facts.recommended]
    assert best.offload_optimizer == "none"
    assert all(need.margin < 0.1 for need in facts.needs if need.cost_rank < best.cost_rank)
    assert patch.apply(config(0), facts.patch)["zero_optimization"]["stage"] == best.stage


def test_one_small_gpu_needs_offload():
    facts = estimate(config(2), SEVEN_B, machine(gpu=24, gpus=1), nproc_per_node=1, device="cuda")
    best = facts.needs[facts.recommended]
    assert "cpu" in (best.offload_optimizer, best.offload_param)
    after = estimate(
        patch.apply(config(2), facts.patch), SEVEN_B, machine(gpu=24, gpus=1), nproc_per_node=1, device="cuda"
    )
    assert after.current is not None
    assert after.current.fits
    assert after.current == after.needs[after.recommended]


def test_the_patch_takes_an_offload_away_in_its_old_spelling():
    given = config(2, cpu_offload=True)
    facts = estimate(given, SEVEN_B, machine(host=60), nproc_per_node=8, device="cuda")
    assert facts.current is not None
    assert facts.current.offload_optimizer == "cpu"
    if facts.patch is not None:
        assert "cpu_offload" not in patch.apply(given, facts.patch)["zero_optimization"]


def test_nothing_fits():
    facts = estimate(config(3), SEVEN_B, machine(gpu=8, host=16, gpus=1), nproc_per_node=1, device="cuda")
    assert facts.recommended is None
    assert facts.patch is None


@pytest.mark.parametrize(
    "unknown",
    [
        MachineFacts(memory_available=64 * GIB),
        MachineFacts(memory_available=64 * GIB, devices=(Device(index=0, name="?"),)),
    ],
)
def test_an_unknown_machine_gets_no_verdict(unknown):
    facts = estimate(config(0), SEVEN_B, unknown, nproc_per_node=1, device="cuda")
    assert {need.fits for need in facts.needs} == {None}
    assert facts.recommended is None


def test_without_the_host_the_gpu_is_judged_all_the_same():
    facts = estimate(config(0), SEVEN_B, MachineFacts(devices=machine().devices), nproc_per_node=8, device="cuda")
    assert facts.current is not None
    assert facts.current.fits is False
    assert any("the host's memory is not known" in text for text in facts.assumptions)


def test_on_the_cpu_all_ranks_share_the_host():
    one, two = (estimate(config(0), SEVEN_B, machine(), nproc_per_node=n, device="cpu").current for n in (1, 2))
    assert one is not None
    assert two is not None
    assert two.per_host.total == 2 * one.per_host.total == 2 * one.per_gpu.total
    assert two.per_gpu.total == one.per_gpu.total


def test_a_tiny_job_fits_everywhere():
    facts = estimate(config(2), TINY, MachineFacts(memory_available=4 * GIB), nproc_per_node=2, device="cpu")
    assert all(need.fits for need in facts.needs)


def test_more_nodes_hold_smaller_shards():
    one = estimate(config(3), SEVEN_B, machine(), nproc_per_node=8, device="cuda").current
    two = estimate(config(3), SEVEN_B, machine(), nproc_per_node=8, nodes=2, device="cuda").current
    assert one is not None
    assert two is not None
    assert two.per_gpu.optimizer * 2 == one.per_gpu.optimizer


def test_nvme_is_a_row_of_its_own():
    given = config(3, offload_optimizer={"device": "nvme", "nvme_path": "/x"})
    facts = estimate(given, SEVEN_B, machine(), nproc_per_node=8, device="cuda")
    assert len(facts.needs) == len(LADDER) + len(WITH_NVME)
    need = facts.current
    assert need is not None
    assert need.offload_optimizer == "nvme"
    assert need.per_nvme == (4 + 8 + 4) * 7_000_000_000


def test_what_is_left_out_is_said():
    said = " ".join(estimate({}, TINY, machine(), nproc_per_node=1, device="cpu").assumptions)
    for word in ("activations", "zero.Init", "counts as Adam", "host memory"):
        assert word in said


def test_json():
    facts = estimate(config(2), SEVEN_B, machine(), nproc_per_node=8, device="cuda")
    document = json.loads(json.dumps(facts.to_dict()))
    assert sum(need["current"] for need in document["needs"]) == 1
    assert {"weights", "gradients", "optimizer", "buffers", "activations", "overhead", "total", "peak"} <= set(
        document["needs"][0]["per_gpu"]
    )
    assert "init_peak" in document["needs"][0]["per_host"]


def test_zero_init_is_advised_where_only_the_whole_model_is_too_large():
    """14 GB of 16-bit weights on GPUs of 12 GiB: every row moves them there first, unless they are built in shards."""
    few = machine(gpu=12, host=2048)
    told = estimate(config(3), SEVEN_B, few, nproc_per_node=8, device="cuda")
    assert told.recommended is None
    assert "zero.Init" in told.advice.loading[0]
    built = estimate(config(3), SEVEN_B, few, nproc_per_node=8, device="cuda", use=Use(zero_init=True))
    assert built.recommended is not None
    from_stage_2 = estimate(config(2), SEVEN_B, few, nproc_per_node=8, device="cuda", use=Use(zero_init=True))
    assert from_stage_2.needs[from_stage_2.recommended].stage == 3


def test_a_model_that_a_script_built_under_zero_init_is_known_as_such():
    whole = estimate(config(3), SEVEN_B, machine(), nproc_per_node=8, device="cuda").current
    cut = estimate(config(3), replace(SEVEN_B, partitioned=True), machine(), nproc_per_node=8, device="cuda").current
    assert whole.per_host.init_peak > 8 * 14e9
    assert cut.per_host.init_peak < whole.per_host.init_peak / 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tensor_parallel": {"autotp_size": 4}}, "tensor parallelism"),
        ({"zero_optimization": {"stage": 3, "zero_quantized_weights": True}}, "quantized weights"),
        ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.3}}}, "ratio"),
    ],
)
def test_what_the_formulas_do_not_know_is_said(change, words):
    told = estimate(config(1) | change, SEVEN_B, machine(), nproc_per_node=8, device="cuda").assumptions
    assert any(words in one for one in told)
    assert not any("not modelled" in one or "ratio" in one for one in _assumed(config(1)))


def _assumed(given: dict) -> tuple[str, ...]:
    return estimate(given, SEVEN_B, machine(), nproc_per_node=8, device="cuda").assumptions
