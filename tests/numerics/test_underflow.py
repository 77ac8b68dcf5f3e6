"""Gradients that fp16 flushes to zero are counted against fp32, and a larger scale brings them back."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dsdoctor.numerics import attach
from dsdoctor.numerics.examiner import Examiner
from dsdoctor.numerics.underflow import Underflow
from tests.numerics.engine import TinyEngine


class Net(nn.Module):
    """Returns its own loss, in fp32, as models do; `factor` makes its gradients small."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).float().mean() * self.factor


def measured(scale: float, factor: float) -> Underflow | None:
    """Ten steps of a small fp16 net whose gradients are `factor` small, at a static loss scale."""
    torch.manual_seed(0)
    engine = TinyEngine(Net(factor).half(), lr=0.0)
    engine.optimizer.loss_scaler.cur_scale = scale
    examiner = Examiner(engine, None)
    with attach(engine, mode="frames", on_first_bad=lambda *_: None) as detector:
        examiner.follow(detector)
        for _ in range(10):
            engine.backward(engine(torch.randn(4, 8).half()))
            engine.step()
        assert detector.problems == []
    return examiner.underflow


def test_small_gradients_at_scale_1_are_flushed_and_a_larger_scale_keeps_them() -> None:
    found = measured(1.0, 1e-7)  # spread over 32 elements: 3e-9, below half of the smallest fp16 number
    assert found is not None
    assert found.share > 0.9
    assert found.factor is not None
    assert found.scale == 1.0


def test_ordinary_gradients_are_kept() -> None:
    found = measured(1024.0, 1.0)
    assert found is not None
    assert found.share < 0.05
    assert found.larger == () or found.share >= 0.01


def test_it_survives_the_way_through_json() -> None:
    one = Underflow(step=3, scale=2.0, share=0.5, worst=(("a", 0.5),), larger=((16.0, 0.1),))
    assert Underflow.from_dict(one.to_dict()) == one
