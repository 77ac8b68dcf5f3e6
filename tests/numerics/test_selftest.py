"""Every planted fault is found in models of several precisions, and the model is as it was afterwards."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dsdoctor.numerics.again import Batch
from dsdoctor.numerics.selftest import selftest


def net(dtype: torch.dtype) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_all_are_found(dtype: torch.dtype) -> None:
    model = net(dtype)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    rows = selftest(model, Batch.now(0, 0, (torch.randn(4, 8).to(dtype),), {}))
    assert {row.fault: row.right for row in rows} == {row.fault: True for row in rows}
    assert len(rows) >= 9
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


class Deaf(nn.Module):
    """Throws away what its inner module makes: a fault there does no harm."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        self.inner(x)
        return x * 2


def test_a_fault_that_does_no_harm_is_no_success() -> None:
    rows = {row.fault: row for row in selftest(Deaf(), Batch.now(0, 0, (torch.randn(4, 8, requires_grad=True),), {}))}
    assert rows["nothing planted"].right is True
    assert (rows["inf in an activation"].right, rows["inf in an activation"].found) == (False, "nothing")
