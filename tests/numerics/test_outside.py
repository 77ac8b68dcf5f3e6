"""What a script computes after its model: the operation that made a loss or its gradient bad, its line and its kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _python_dispatch
from torch.utils.flop_counter import FlopCounterMode

from dsdoctor.finding import FirstBad
from dsdoctor.numerics import attach
from tests.numerics.engine import TinyEngine
from tests.numerics.test_phases import LABELS, Net, batches, train

NOTHING = torch.zeros(4)


def first(loss: Callable[[Tensor], Tensor], count: int = 1, **engine: Any) -> FirstBad:
    _, hits = train(TinyEngine(Net(), **engine), batches(count), loss)
    return hits[0][0]


LOSSES: dict[str, tuple[Callable[[Tensor], Tensor], str, str, str]] = {
    "a temperature of 0": (lambda out: F.cross_entropy(out / 0.0, LABELS), "aten.div", "inf", "domain"),
    "a mean over nothing": (
        lambda out: (F.cross_entropy(out, LABELS, reduction="none") * NOTHING).sum() / NOTHING.sum(),
        *("aten.div", "nan", "domain"),
    ),
    "a density that is 0": (lambda out: -torch.log(torch.exp(out - 500)).mean(), "aten.log", "inf", "domain"),
    "an exp that is too large": (
        lambda out: (x := torch.exp(out + 200)).sum() - x.sum(),
        "aten.exp",
        "inf",
        "overflow",
    ),
    "a mask over everything": (
        lambda out: torch.softmax(out.masked_fill(torch.ones(4, 8, dtype=torch.bool), float("-inf")), -1).sum(),
        *("aten._softmax", "nan", "masked-row"),
    ),
    "labels that are all ignored": (
        lambda out: F.cross_entropy(out, torch.full((4,), -100)) / 2,
        *("aten.nll_loss_forward", "nan", "ignored-labels"),
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_the_operation_of_a_loss_is_named(name: str) -> None:
    loss, op, kind, cause = LOSSES[name]
    found = first(loss)
    assert (found.phase, found.module, found.op, found.kind, found.cause) == ("loss", "", op, kind, cause)
    assert __file__ in (found.line or "")


def test_a_bad_target_is_not_charged_to_the_loss() -> None:
    target = torch.full((4, 8), float("inf"))
    found = first(lambda out: F.smooth_l1_loss(out, target))
    assert (found.phase, found.op, found.kind, found.cause) == ("loss", None, "inf", "bad-input")


def test_a_value_that_arose_inside_the_model_stays_there() -> None:
    class Exp(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.exp(x + 200)

    _, hits = train(TinyEngine(Net(Exp())), batches(1), lambda out: torch.log(out.pow(2).sum() * 0))
    assert (hits[0][0].phase, hits[0][0].module, hits[0][0].op) == ("forward", "middle", "aten.exp")


def test_the_derivative_between_model_and_loss_is_named() -> None:
    found = first(lambda out: (out - out.detach()).pow(2).sum(-1).sqrt().mean())
    assert (found.phase, found.module, found.op, found.cause) == ("backward", "", "aten.sqrt", "backward-singularity")
    assert ".sqrt().mean()" in (found.line or "")


def test_a_derivative_is_named_as_torch_names_the_operation() -> None:
    """The gradient of 1e5 is finite in float32, and no float16 once the cast in front of the loss hands it back."""
    net = Net().half()
    _, hits = train(TinyEngine(net), [b.half() for b in batches(1)], lambda out: out.float().sum() * 1e5)
    assert (hits[0][0].phase, hits[0][0].op, hits[0][0].kind) == ("backward", "aten._to_copy", "inf")


def test_a_derivative_inside_the_model_is_not_charged_to_the_loss() -> None:
    class Length(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.sqrt((x * 0).pow(2).sum(-1, keepdim=True)) + x

    _, hits = train(TinyEngine(Net(Length())), batches(1), lambda out: out.pow(2).mean().sqrt())
    assert (hits[0][0].phase, hits[0][0].module, hits[0][0].op) == ("backward", "middle", None)


def test_each_micro_step_is_followed_anew() -> None:
    counts = iter([1.0, 1.0, 0.0])
    found = first(lambda out: out.pow(2).sum() / torch.tensor(next(counts)), count=3, accumulation=2)
    assert (found.step, found.micro_step, found.op, found.kind) == (1, 0, "aten.div", "inf")


def test_a_healthy_run_is_left_as_it_was() -> None:
    states: list[tuple[bool, int]] = []

    def loss(out: Tensor) -> Tensor:
        mask = torch.full((8, 8), float("-inf")).triu(1)
        return (torch.softmax(out @ out.T @ torch.ones(4, 8) + mask[:4], -1) * out).pow(2).mean()

    engine = TinyEngine(Net())
    with attach(engine, mode="frames") as detector:
        for batch in batches(3):
            engine.backward(loss(engine(batch)))
            states.append((torch.is_anomaly_enabled(), len(_python_dispatch._get_current_dispatch_mode_stack())))
            engine.step()
    assert detector.first_bad is None
    assert detector.problems == []
    assert states == [(False, 0)] * 3


@pytest.mark.parametrize("wide", [True, False], ids=["around all", "around the loss"])
def test_a_mode_of_the_scripts_own_is_left_in_order(wide: bool) -> None:
    engine = TinyEngine(Net())
    with attach(engine, mode="frames") as detector:
        for batch in batches(3):
            out = engine(batch) if not wide else None
            with FlopCounterMode(display=False):
                out = engine(batch) if out is None else out
                loss = out.pow(2).mean() / 0
                engine.backward(loss)
            engine.step()
        assert detector.first_bad is not None
    assert _python_dispatch._get_current_dispatch_mode_stack() == []
    assert not torch.is_anomaly_enabled()
    assert detector.problems == []


class _Own(torch.autograd.Function):
    """The identity, with a derivative that divides by zero."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 1

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (x,) = ctx.saved_tensors
        return gradients[0] * ((x - x) / (x * 0))


def test_a_derivative_that_the_script_wrote_is_looked_into() -> None:
    found = first(lambda out: _Own.apply(out).pow(2).mean())  # type: ignore[no-untyped-call]
    assert (found.phase, found.op, found.cause) == ("backward", "aten.div", "backward-singularity")
    assert "(x - x) / (x * 0)" in (found.line or "")


def test_a_loss_that_the_script_stops_for_is_found_although_no_backward_follows() -> None:
    engine = TinyEngine(Net())
    hits: list[FirstBad] = []
    detector = attach(engine, mode="frames", on_first_bad=lambda found, *_: hits.append(found))
    for scale in (1.0, 0.0):
        loss = torch.log(engine(batches(1)[0]).pow(2).sum() * scale)
        if not torch.isfinite(loss):
            break
        engine.backward(loss)
        engine.step()
    detector.detach()
    assert [(h.step, h.phase, h.op, h.kind) for h in hits] == [(1, "loss", "aten.log", "inf")]


def test_metrics_of_a_healthy_run_are_no_loss() -> None:
    engine = TinyEngine(Net())
    with attach(engine, mode="frames") as detector:
        for batch in batches(2):
            engine.backward(engine(batch).pow(2).mean())
            engine.step()
            assert torch.tensor([]).mean().isnan()
        with torch.no_grad():
            assert (engine(batches(1)[0]) * 0).sum().log().isinf()
    assert detector.first_bad is None
