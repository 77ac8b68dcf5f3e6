"""The patch is executable and makes finite what overflowed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dsdoctor.numerics.events import Event, Origin
from dsdoctor.numerics.patch import fp32_patch


def event(**changes: object) -> Event:
    fields = {
        "step": 0, "micro_step": 0, "phase": "forward", "module": "ffn.down", "tensor": "output", "kind": "inf",
        "dtype": "float16", "batch": 0, "origin": Origin(op="aten.addmm", cause="overflow"),
    }  # fmt: skip
    return Event(**(fields | changes))  # type: ignore[arg-type]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 16), nn.Linear(16, 4)
        nn.init.constant_(self.up.weight, 100.0), nn.init.constant_(self.down.weight, 100.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


def model() -> nn.ModuleDict:
    return nn.ModuleDict({"ffn": Block(), "norm": nn.LayerNorm(4)}).half()


def run(parts: nn.ModuleDict) -> tuple[Tensor, Tensor]:
    hidden = parts["ffn"](torch.ones(2, 4, dtype=torch.float16))
    return hidden, parts["norm"](hidden)


def apply(patch: str, parts: nn.ModuleDict, call: str = "") -> None:
    namespace = {"model": parts}
    exec(patch if not call else patch[: patch.rindex("keep_in_fp32(model")] + call, namespace)


@pytest.mark.parametrize("module", ["ffn.down", "ffn"])
def test_the_part_behind_becomes_finite_and_trains(module: str) -> None:
    before = model()
    assert run(before)[0].isinf().all()
    assert run(before)[1].isnan().all()
    parts = model()
    apply(fp32_patch(event(module=module), "Linear"), parts)
    hidden, normed = run(parts)
    assert hidden.dtype == torch.float16
    assert hidden.isfinite().all()
    assert normed.isfinite().all()
    normed.float().sum().backward()
    assert all(
        p.grad is not None and p.grad.dtype == torch.float16 and p.grad.isfinite().all() for p in parts.parameters()
    )


def test_the_output_can_stay_in_fp32_and_is_then_exact() -> None:
    parts = model()
    call = 'keep_in_fp32(model, "ffn.down", back_to=None)'
    apply(fp32_patch(event(), "Linear"), parts, call)
    up = torch.nn.functional.linear(torch.ones(2, 4).half(), parts["ffn"].up.weight, parts["ffn"].up.bias).float()  # type: ignore[union-attr, arg-type]
    exact = nn.functional.linear(torch.relu(up), parts["ffn"].down.weight.float(), parts["ffn"].down.bias.float())  # type: ignore[union-attr, operator]
    hidden = parts["ffn"](torch.ones(2, 4).half())
    assert hidden.dtype == torch.float32
    assert torch.equal(hidden, exact)


def test_weights_and_names_are_untouched() -> None:
    parts = model()
    names = list(parts.state_dict())
    apply(fp32_patch(event(), "Linear"), parts)
    run(parts)
    assert list(parts.state_dict()) == names
    assert {p.dtype for p in parts.parameters()} == {torch.float16}
    assert "weight" not in parts["ffn"].down.__dict__  # type: ignore[union-attr, operator]


def test_running_statistics_go_on() -> None:
    parts = nn.ModuleDict({"ffn": nn.ModuleDict({"down": nn.BatchNorm1d(4)})}).half()
    apply(fp32_patch(event(), "BatchNorm1d"), parts)
    norm = parts["ffn"]["down"]  # type: ignore[index]
    norm(torch.full((3, 4), 2.0).half())
    assert torch.allclose(norm.running_mean.float(), torch.full((4,), 0.2), atol=1e-3), "momentum 0.1 of a mean of 2"


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "bfloat16"},
        {"dtype": "float32"},
        {"phase": "backward"},
        {"origin": Origin(op="aten.log", cause="domain")},
    ],
)
def test_no_patch_where_it_would_not_help(changes: dict[str, object]) -> None:
    assert fp32_patch(event(**changes), "Linear") == ""
