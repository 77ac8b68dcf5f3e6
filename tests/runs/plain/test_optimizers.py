from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dsdoctor.runs.plain import optimizers
from dsdoctor.runs.plain.errors import UnsupportedByPlain
from dsdoctor.runs.plain.rules import Lamb, Lion, PlainAdam


def weight(*values: float) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values, dtype=torch.float64))


def run(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, steps: int = 5) -> torch.Tensor:
    for step in range(steps):
        parameter.grad = torch.tensor([0.5, -2.0, 1.0], dtype=torch.float64) * (step + 1)
        optimizer.step()
    return parameter.detach()


@pytest.mark.parametrize(
    ("name", "options", "kind", "decay"),
    [
        # DeepSpeed's fused and CPU Adam decay by 0 unless told; torch's AdamW, which torch_adam picks, by 0.01.
        ("Adam", {}, torch.optim.AdamW, 0.0),
        ("AdamW", {}, torch.optim.AdamW, 0.0),
        ("AdamW", {"torch_adam": True}, torch.optim.AdamW, 0.01),
        ("adam", {"adam_w_mode": False, "weight_decay": 0.1}, torch.optim.Adam, 0.1),
        ("AdamW", {"adam_w_mode": False}, torch.optim.AdamW, 0.0),
        ("Adam", {"bias_correction": False}, PlainAdam, 0.0),
        ("Adagrad", {"lr": 0.1}, torch.optim.Adagrad, 0.0),
        ("SGD", {"lr": 0.1, "momentum": 0.9}, torch.optim.SGD, 0.0),
        ("Lamb", {"max_coeff": 5.0}, Lamb, 0.0),
        ("lion", {"weight_decay": 0.2}, Lion, 0.2),
    ],
)
def test_chooses_the_plain_rule(name: str, options: dict[str, Any], kind: type, decay: float) -> None:
    notes: list[str] = []
    built = optimizers.from_config(name, [weight(1.0)], options, notes)
    assert type(built) is kind
    assert built.param_groups[0]["weight_decay"] == decay
    assert notes == []


def test_leaves_out_and_notes_what_the_rule_does_not_know() -> None:
    notes: list[str] = []
    optimizers.from_config("AdamW", [weight(1.0)], {"lr": 0.1, "max_grad_norm": 1.0}, notes)
    assert "max_grad_norm" in notes[0]


@pytest.mark.parametrize("name", ["OneBitAdam", "Muon", "ZeroOneAdam"])
def test_says_so_where_there_is_no_plain_rule(name: str) -> None:
    with pytest.raises(UnsupportedByPlain, match=name):
        optimizers.from_config(name, [weight(1.0)], {}, [])


def test_a_name_that_nobody_has_is_refused() -> None:
    with pytest.raises(AttributeError):
        optimizers.from_config("AdamX", [weight(1.0)], {}, [])


@pytest.mark.parametrize(("decoupled", "torch_s"), [(True, torch.optim.AdamW), (False, torch.optim.Adam)])
def test_own_adam_with_bias_correction_is_torch_s(decoupled: bool, torch_s: Any) -> None:
    mine, theirs = weight(1.0, 2.0, 3.0), weight(1.0, 2.0, 3.0)
    ours = run(PlainAdam([mine], lr=0.1, weight_decay=0.1, decoupled=decoupled), mine)
    torch.testing.assert_close(ours, run(torch_s([theirs], lr=0.1, weight_decay=0.1), theirs))


def test_without_bias_correction_the_first_step_is_larger_by_the_known_ratio() -> None:
    parameter = weight(0.0, 0.0, 0.0)
    run(PlainAdam([parameter], lr=1.0, eps=0.0, bias_correction=False), parameter, steps=1)
    # m = 0.1 g, v = 0.001 g^2, so m / sqrt(v) = 0.1 / sqrt(0.001) in the direction of g
    expected = 0.1 / 0.001**0.5 * torch.tensor([-1.0, 1.0, -1.0], dtype=torch.float64)
    torch.testing.assert_close(parameter.detach(), expected)


def test_lion_steps_by_signs() -> None:
    parameter = weight(1.0, 1.0, 1.0)
    run(Lion([parameter], lr=0.1, weight_decay=0.5), parameter, steps=1)
    torch.testing.assert_close(parameter.detach(), torch.tensor([0.85, 1.05, 0.85], dtype=torch.float64))


def test_lamb_scales_by_the_bounded_trust_ratio() -> None:
    # First step: m / sqrt(v) is the sign of the gradient, of norm sqrt(3); the weights' norm is 3 sqrt(3).
    parameter = weight(3.0, 3.0, 3.0)
    run(Lamb([parameter], lr=0.1, eps=0.0), parameter, steps=1)
    torch.testing.assert_close(parameter.detach(), torch.tensor([2.7, 3.3, 2.7], dtype=torch.float64))
    bounded = weight(3.0, 3.0, 3.0)
    run(Lamb([bounded], lr=0.1, eps=0.0, max_coeff=2.0), bounded, steps=1)
    torch.testing.assert_close(bounded.detach(), torch.tensor([2.8, 3.2, 2.8], dtype=torch.float64))


def test_exchanges_deepspeed_s_classes_over_the_same_groups() -> None:
    class DeepSpeedCPUAdam(torch.optim.Optimizer):
        __module__ = "deepspeed.ops.adam.cpu_adam"
        adam_w_mode = False

        def step(self, closure: Any = None) -> Any:
            raise AssertionError("DeepSpeed's own rule must not run")

    mine, theirs = weight(1.0, 2.0, 3.0), weight(1.0, 2.0, 3.0)
    settings = {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-8, "weight_decay": 0.1, "bias_correction": True}
    given = DeepSpeedCPUAdam([mine], settings)
    schedule = torch.optim.lr_scheduler.StepLR(given, 1, gamma=0.5)
    plain = optimizers.from_client(given, None)
    reference = torch.optim.Adam([theirs], lr=0.1, betas=(0.8, 0.9), weight_decay=0.1)
    torch.testing.assert_close(run(plain, mine), run(reference, theirs))
    schedule.step()
    assert plain.param_groups[0]["lr"] == 0.05


def test_a_callable_gets_the_parameters() -> None:
    parameter = weight(1.0)
    built = optimizers.from_client(lambda params: torch.optim.SGD(params, lr=0.3), [parameter])
    assert built.param_groups[0]["params"] == [parameter]
