"""The largest number that fits, traffic by hand, and the order of the rows."""

from hypothesis import given
from hypothesis import strategies as st

from dsdoctor.machine.facts import Device, MachineFacts
from dsdoctor.memory.activations import Workload, of_transformer
from dsdoctor.memory.advice import largest
from dsdoctor.memory.analysis import analyze
from dsdoctor.memory.estimate import Use, estimate
from dsdoctor.memory.hf_config import shape_of
from dsdoctor.memory.inventory import Inventory
from dsdoctor.memory.parameter import Parameter
from dsdoctor.memory.shape import parameters
from dsdoctor.memory.traffic import cost
from tests.memory.test_shape import GROUPED
from tests.memory.test_terms import BF16, CPU, P, setup

GIB = 1 << 30
SHAPE = shape_of({"model_type": "llama", **GROUPED})


@given(st.integers(0, 5000), st.integers(1, 5000))
def test_the_largest_that_fits_is_found(limit, most):
    assert largest(lambda count: count <= limit, most=most) == min(limit, most)


def test_network_by_hand():
    """2 ranks, 16-bit gradients and weights of P parameters: each rank sends half of what is reduced and gathered."""
    accumulating = BF16 | {"gradient_accumulation_steps": 4}
    assert cost(setup(BF16, 1)).network == 2 * 2 * P // 2
    assert cost(setup(accumulating, 1)).network == 2 * 2 * P // 2
    assert cost(setup(accumulating, 2)).network == (4 + 1) * 2 * P // 2
    assert cost(setup(accumulating, 3)).network == 4 * 3 * 2 * P // 2
    assert cost(setup(BF16, 3, ranks=1)).network == 0


def test_pcie_and_disk_by_hand():
    """Stage 3 on 2 ranks: 16-bit gradients down, weights up, P / 2 of each; with NVMe masters and states both ways."""
    assert cost(setup(BF16, 3, offload_optimizer=CPU)).pcie == (2 + 2) * P // 2
    both = cost(setup(BF16, 3, offload_optimizer=CPU, offload_param=CPU))
    assert both.pcie == (2 + 2) * P // 2 + 2 * 2 * P // 2
    nvme = cost(setup(BF16, 3, offload_optimizer={"device": "nvme", "nvme_path": "/x"}))
    assert nvme.disk == (2 * (4 + 8) + 4) * P // 2


def test_activations_grow_with_the_work():
    def saved(**work) -> int:
        return of_transformer(SHAPE, Workload(**work), weight=2).saved

    one = saved(micro_batch=1, sequence=128)
    assert saved(micro_batch=3, sequence=128) == 3 * one
    assert saved(micro_batch=1, sequence=256) == 2 * one
    eager = saved(micro_batch=1, sequence=128, attention="eager")
    assert eager > one
    assert saved(micro_batch=1, sequence=256, attention="eager") > 2 * eager
    assert saved(micro_batch=1, sequence=128, checkpointing=True) < one / 5
    assert saved(micro_batch=1, sequence=128, frozen=True) < one


def test_without_a_sequence_activations_are_not_guessed():
    assert not of_transformer(SHAPE, Workload(micro_batch=4), weight=2).known


def test_logits_by_hand():
    """Two tokens and 96 words in bf16: 2 bytes of logits, 4 of their log-softmax, two gradients of 4."""
    assert of_transformer(SHAPE, Workload(micro_batch=1, sequence=2), weight=2).loss == (2 + 4 + 4 + 4) * 2 * 96


def test_rows_are_ordered_by_what_they_cost():
    model = Inventory(parameters=parameters(SHAPE), shape=SHAPE)
    devices = tuple(Device(index=i, name="G", total_bytes=80 * GIB, free_bytes=80 * GIB) for i in range(2))
    machine = MachineFacts(devices=devices, memory_available=64 * GIB)
    facts = estimate(
        {"bf16": {"enabled": True}, "gradient_accumulation_steps": 8},
        model,
        machine,
        nproc_per_node=2,
        device="cuda",
        use=Use(sequence=64),
    )
    costs = [one.cost.seconds for one in facts.needs]
    assert costs == sorted(costs)
    assert facts.needs[0].cost.slowdown == 1
    order = [one.stage for one in facts.needs if (one.offload_optimizer, one.offload_param) == ("none", "none")]
    assert order == [0, 1, 2, 3]


def test_fp32_is_offered_bf16_last():
    """The precision changes the numbers: it is recommended only where nothing else fits (here for the activations)."""
    model = Inventory(parameters=parameters(SHAPE), shape=SHAPE)
    use = Use(sequence=1024, micro_batch=64)
    free = MachineFacts(memory_available=1 << 40)
    needs = estimate({}, model, free, nproc_per_node=1, device="cpu", use=use).needs
    assert {one.precision for one in needs} == {"fp32", "bf16"}
    least = min(one.per_host.peak for one in needs if one.precision == "fp32")
    lean = min(one.per_host.peak for one in needs if one.precision == "bf16")
    machine = MachineFacts(memory_available=(least + lean) // 2)
    tight = estimate({}, model, machine, nproc_per_node=1, device="cpu", use=use)
    assert tight.needs[tight.recommended].precision == "bf16"
    assert tight.patch["bf16"] == {"enabled": True}


def test_buckets_fill_in_order():
    """Gradients of 4, 4, 9 and 3 elements in buckets of 8: two together, one too large for any, the last alone."""
    model = Inventory(parameters=tuple(Parameter(f"{i}.w", size) for i, size in enumerate((4, 4, 9, 3))))
    assert (model.fullest_bucket(8), model.first_bucket(8)) == (8, 8)
    assert (model.fullest_bucket(3), model.first_bucket(3)) == (0, 0)
    assert model.fullest_bucket(10**9) == 20


def test_activation_checkpointing_is_advised_where_it_would_do():
    """Llama-2 7B at stage 3 on 8 GPUs of 80 GiB: 98 GiB of activations at 8 sequences of 2048 tokens, 2 GiB with it."""
    shape = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "vocab_size": 32000}
    shape = shape_of({"model_type": "llama", "intermediate_size": 11008, **shape})
    model = Inventory(parameters=parameters(shape, loaded=2.0), shape=shape)
    gpus = tuple(Device(index=i, name="A100", total_bytes=80 << 30, free_bytes=80 << 30) for i in range(8))
    machine = MachineFacts(versions={"deepspeed": "0.19.8"}, memory_available=1 << 40, devices=gpus)
    config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}, "optimizer": {"type": "AdamW"}}

    def analyzed(micro_batch, **use):
        return analyze(config, model, machine, ranks_per_host=8, use=Use(micro_batch=micro_batch, sequence=2048, **use))

    tight = analyzed(8)
    assert tight.memory.advice.checkpointing == "given"
    (finding,) = [one for one in tight.findings if one.id == "memory/will-not-fit"]
    assert any("activation checkpointing" in fix.text for fix in finding.fixes)
    assert analyzed(8, checkpointing=True).memory.current.fits is True
    assert analyzed(8, checkpointing=True).memory.advice.checkpointing is None
    assert analyzed(1).memory.advice.checkpointing is None
