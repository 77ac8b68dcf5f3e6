"""Jobs that fit and jobs that do not, on hand-made machines."""

from dataclasses import replace

import pytest

from dsdoctor.case import Case
from dsdoctor.machine.facts import Device, MachineFacts
from dsdoctor.memory.estimate import estimate
from dsdoctor.runs.facts import ModelFacts
from tests.diagnoses.examples import found

GIB = 1 << 30
SEVEN_B = ModelFacts(
    class_name="Big",
    parameters=7_000_000_000,
    trainable=7_000_000_000,
    largest_layer=200_000_000,
    dtypes=(("torch.bfloat16", 7_000_000_000),),
)
TINY = ModelFacts(class_name="Tiny", parameters=100_000, trainable=100_000, largest_layer=10_000)


def case(
    model: ModelFacts, stage: int, *, gpu: float = 80, host: float = 1024, ranks: int = 8, device: str = "cuda", **zero
):
    bytes_ = int(gpu * GIB)
    devices = tuple(Device(index=i, name="G", total_bytes=bytes_, free_bytes=bytes_) for i in range(ranks))
    machine = MachineFacts(versions={"deepspeed": "0.19.8"}, memory_available=int(host * GIB), devices=devices)
    config = {
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": stage, **zero},
    }
    return Case(memory=estimate(config, model, machine, nproc_per_node=ranks, device=device))


GPU_TOO_SMALL = case(SEVEN_B, 0)
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
HOST_TOO_SMALL = case(SEVEN_B, 2, host=128, **OFFLOAD)
RANKS_ON_THE_CPU = case(SEVEN_B, 0, host=64, ranks=2, device="cpu")
TIGHT = case(SEVEN_B, 2, gpu=31)
ONLY_LOADING = case(SEVEN_B, 2, host=64)
ROOMY = case(SEVEN_B, 2)

POSITIVE: dict[str, list[Case]] = {
    "memory/will-not-fit": [GPU_TOO_SMALL, HOST_TOO_SMALL, RANKS_ON_THE_CPU, TIGHT, ONLY_LOADING]
}
NEGATIVE: dict[str, list[Case]] = {
    "memory/will-not-fit": [
        Case(),
        ROOMY,
        case(TINY, 2, host=4, ranks=2, device="cpu"),
        case(TINY, 3, gpu=16, host=16, ranks=1),
        Case(memory=estimate({}, SEVEN_B, MachineFacts(), nproc_per_node=1, device="cuda")),
    ]
}


@pytest.mark.parametrize("one", POSITIVE["memory/will-not-fit"])
def test_positive(one):
    (finding,) = found(one, "memory/will-not-fit")
    assert finding.evidence
    assert finding.fixes


@pytest.mark.parametrize("one", NEGATIVE["memory/will-not-fit"])
def test_negative(one):
    assert found(one, "memory/will-not-fit") == []


def only(one: Case):
    (finding,) = found(one, "memory/will-not-fit")
    return finding


def test_a_gpu_that_is_too_small_is_not_hidden_by_a_host_that_only_loading_overfills():
    finding = only(case(SEVEN_B, 3, gpu=16, host=32))
    assert finding.severity == "error"
    assert finding.cause.startswith("a GPU needs")
    assert only(ONLY_LOADING).severity == "warning"


def test_evidence_says_which_and_when():
    assert only(GPU_TOO_SMALL).cause.startswith("a GPU needs")
    assert "optimizer step" in only(GPU_TOO_SMALL).cause
    assert only(HOST_TOO_SMALL).cause.startswith("the host needs")
    assert "while training" in only(HOST_TOO_SMALL).evidence[1].text
    assert only(RANKS_ON_THE_CPU).cause.startswith("the host needs")


def test_little_headroom_is_a_warning():
    finding = only(TIGHT)
    assert finding.severity == "warning"
    assert TIGHT.memory.current.fits


def test_what_only_does_not_fit_while_loading_is_no_error():
    """Under zero.Init, or with the ranks loading one after the other, it may do."""
    finding = only(ONLY_LOADING)
    assert "loading the model" in finding.cause
    assert finding.severity == "warning"


def test_the_fix_is_the_row_that_fits():
    finding = only(GPU_TOO_SMALL)
    assert finding.severity == "error"
    assert finding.fixes[0].patch == {"zero_optimization": {"stage": 1}}


def test_no_row_fits():
    finding = only(case(SEVEN_B, 3, gpu=8, host=16, ranks=1))
    assert finding.fixes[0].patch is None
    assert "NVMe" in finding.fixes[0].text


def test_an_estimate_without_a_machine_makes_no_finding():
    facts = replace(
        GPU_TOO_SMALL.memory, needs=tuple(replace(n, fits=None, margin=None) for n in GPU_TOO_SMALL.memory.needs)
    )
    assert found(Case(memory=facts), "memory/will-not-fit") == []
