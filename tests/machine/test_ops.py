"""Which compiled ops a config uses."""

import pytest

from dsdoctor.machine.ops import needed


def names(config: dict, accelerator: str = "cuda") -> list[str]:
    return [op.builder for op in needed(config, accelerator)]


def zero(stage: int, **offloads: str) -> dict:
    return {"zero_optimization": {"stage": stage, **{key: {"device": where} for key, where in offloads.items()}}}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, []),
        ({"optimizer": {"type": "AdamW"}}, ["FusedAdamBuilder"]),
        ({"optimizer": {"type": "Adam", "params": {"torch_adam": True}}}, []),
        ({"optimizer": {"type": "SGD"}}, []),
        ({"optimizer": {"type": "Lamb"}}, ["FusedLambBuilder"]),
        ({"optimizer": {"type": "AdamW"}} | zero(2, offload_optimizer="cpu"), ["CPUAdamBuilder"]),
        (
            {"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}} | zero(2, offload_optimizer="cpu"),
            [],
        ),
        ({"optimizer": {"type": "Lion"}} | zero(3, offload_optimizer="nvme"), ["CPULionBuilder", "AsyncIOBuilder"]),
        (zero(3, offload_optimizer="nvme", offload_param="nvme"), ["AsyncIOBuilder"]),
        (zero(2, offload_param="nvme"), []),  # does nothing below stage 3
        ({"optimizer": "AdamW", "zero_optimization": True}, []),
    ],
)
def test_needed(config, expected):
    assert names(config) == expected


def test_the_cpu_accelerator_always_loads_its_communication():
    assert names({}, "cpu") == ["ShareMemCommBuilder"]


def test_who_asks_is_named():
    (op,) = needed(zero(3, offload_param="nvme"), "cuda")
    assert op.needed_by == "zero_optimization.offload_param.device"
