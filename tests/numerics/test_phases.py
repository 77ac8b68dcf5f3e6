"""Each phase in which a first bad value can appear, each with the place, the time and the kind that must be named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dsdoctor.finding import FirstBad
from dsdoctor.numerics import Detector, attach
from tests.numerics.engine import TinyEngine

LABELS = torch.zeros(4, dtype=torch.long)


class Net(nn.Module):
    """Two layers around a `middle` that a test chooses."""

    def __init__(self, middle: nn.Module | None = None, width: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.middle = middle or nn.Tanh()
        self.last = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(torch.tanh(self.first(x))))


def train(
    engine: TinyEngine,
    batches: list[Any],
    loss: Callable[[Any], Tensor] = lambda out: out.float().pow(2).mean(),
    **options: Any,
) -> tuple[Detector, list[tuple[FirstBad, str, str]]]:
    """Run the batches under the detector and return it with what it called back."""
    hits: list[tuple[FirstBad, str, str]] = []
    detector = attach(engine, on_first_bad=lambda *hit: hits.append(hit), **{"mode": "frames", **options})
    try:
        for batch in batches:
            engine.backward(loss(engine(batch)))
            engine.step()
    finally:
        detector.detach()
    assert detector.problems == []
    return detector, hits


def batches(count: int, *, seed: int = 0) -> list[Tensor]:
    torch.manual_seed(seed)
    return [torch.randn(4, 8) for _ in range(count)]


class Log(nn.Module):
    """log of |x|: -inf for a zero, hidden by a tanh behind it."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.log(x.abs())


@pytest.mark.parametrize("mode", ["auto", "sentinel"])
def test_healthy_training_has_no_finding(mode: Any) -> None:
    detector, hits = train(TinyEngine(Net()), batches(5), mode=mode)
    assert hits == []
    assert detector.first_bad is None


def test_a_feature_of_minus_inf_is_no_mask() -> None:
    data = batches(4)
    data[3][1, 3] = -float("inf")
    net = Net(nn.LayerNorm(8))
    _, hits = train(TinyEngine(net, accumulation=2), data, lambda out: nn.functional.cross_entropy(out, LABELS))
    assert (hits[0][0].step, hits[0][0].micro_step, hits[0][0].phase) == (1, 1, "input")
    assert (hits[0][0].tensor, hits[0][0].kind, hits[0][0].cause) == ("input[0]", "inf", "bad-input")


def test_nan_in_the_batch() -> None:
    data = batches(4)
    data[2][1, 3] = float("nan")
    _, hits = train(TinyEngine(Net(), accumulation=2), data)
    found = hits[0][0]
    assert (found.step, found.micro_step) == (1, 0)
    assert (found.phase, found.module, found.tensor, found.kind) == ("input", "", "input[0]", "nan")
    assert found.cause == "bad-input"


def test_bad_value_deep_in_a_keyword_batch() -> None:
    class Keyed(Net):
        def forward(self, *, batch: dict[str, list[Tensor]]) -> Tensor:  # type: ignore[override]
            return super().forward(batch["features"][0])

    engine = TinyEngine(Keyed())
    bad = torch.full((4, 8), float("inf"))
    hits: list[FirstBad] = []
    with attach(engine, mode="frames", on_first_bad=lambda found, *_: hits.append(found)):
        engine.backward(engine(batch={"features": [bad]}).sum())
    assert (hits[0].phase, hits[0].tensor, hits[0].kind) == ("input", "input[batch][features][0]", "inf")


def test_corrupted_weight_is_named_with_its_owner() -> None:
    net = Net(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    with torch.no_grad():
        net.middle[1].bias[2] = float("nan")  # type: ignore[index, union-attr]
    _, hits = train(TinyEngine(net), batches(2))
    found = hits[0][0]
    assert (found.step, found.phase, found.module, found.tensor) == (0, "parameter", "middle.1", "bias")
    assert found.cause == "corrupted-weights"


def test_forward_birth_names_the_innermost_module_and_the_operation() -> None:
    class Root(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.sqrt(x - x.max() - 1)

    _, hits = train(TinyEngine(Net(nn.Sequential(nn.Identity(), Root()))), batches(1))
    found, report, _ = hits[0]
    assert (found.phase, found.module, found.tensor, found.kind) == ("forward", "middle.1", "output", "nan")
    assert (found.op, found.cause) == ("aten.sqrt", "domain")
    assert "middle.1 Root" in report.splitlines()[-3], "the last frame is the module itself"


def test_an_inf_hidden_from_the_loss_is_the_first_bad_value() -> None:
    """The loss stays finite; only backward turns the -inf into NaN. Two batches go well before."""

    class Hidden(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.last(torch.tanh(self.first(self.middle(x))))

    data = batches(3)
    data[2][0, 0] = 0.0
    losses: list[float] = []

    def loss(out: Tensor) -> Tensor:
        value = out.pow(2).mean()
        losses.append(value.item())
        return value

    class LogParameter(Log):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * self.scale)

    _, hits = train(TinyEngine(Hidden(LogParameter())), data, loss)
    assert all(torch.isfinite(torch.tensor(losses)))
    found = hits[0][0]
    assert (found.step, found.phase, found.module, found.kind) == (2, "forward", "middle", "inf")
    assert (found.op, found.cause) == ("aten.log", "domain")


def test_value_born_in_the_code_between_two_modules() -> None:
    class Between(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.last(torch.log(torch.relu(self.first(x)) - 1))

    _, hits = train(TinyEngine(Between()), batches(1))
    found = hits[0][0]
    assert (found.phase, found.module, found.tensor) == ("forward", "", "input[0] of last")
    assert found.op == "aten.log"


@pytest.mark.parametrize("mode", ["frames", "sentinel", "auto"])
def test_both_births_are_told(mode: Any) -> None:
    """An inf is made in one module and turns into NaN in another."""
    net = Net(nn.Sequential(nn.Linear(8, 8), nn.Hardtanh(0, 1), Log(), nn.LayerNorm(8)))
    found, report, _ = train(TinyEngine(net), batches(1), mode=mode)[1][0]
    block = "middle" if mode == "sentinel" else "middle.2"
    if mode == "sentinel":  # inside a block it does not see
        assert (found.module, found.kind) == (block, "nan")
        return
    assert (found.module, found.kind) == (block, "inf")
    assert "Born as inf there, it became NaN in middle.3: output." in report


@pytest.mark.parametrize("mode", ["frames", "sentinel"])
def test_a_criterion_inside_the_model_that_is_called_after_it_is_no_batch(mode: Any) -> None:
    net = Net()
    net.criterion = nn.MSELoss()
    with attach(net, mode=mode) as detector:
        for batch in batches(3):
            net.criterion(net(batch), batch).backward()
    assert detector.clock.batch == 2


def test_loss_computed_outside_the_model() -> None:
    _, hits = train(TinyEngine(Net()), batches(1), lambda out: torch.log(out.sum() * 0 - 1))
    assert (hits[0][0].phase, hits[0][0].module, hits[0][0].tensor) == ("loss", "", "loss")


def test_loss_whose_labels_are_all_ignored() -> None:
    labels = torch.full((4,), -100)
    _, hits = train(TinyEngine(Net()), batches(1), lambda out: nn.functional.cross_entropy(out, labels) / 2)
    assert (hits[0][0].phase, hits[0][0].cause) == ("loss", "ignored-labels")


def test_backward_singularity_names_the_module_whose_derivative_it_is() -> None:
    class Length(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.sqrt((x * 0).pow(2).sum(-1, keepdim=True)) + x

    _, hits = train(TinyEngine(Net(Length())), batches(1))
    found = hits[0][0]
    assert (found.phase, found.module, found.tensor, found.kind) == ("backward", "middle", "input[0].grad", "nan")
    assert found.cause == "backward-singularity"


def test_backward_of_the_code_between_modules_names_the_module_it_stands_in() -> None:
    class Between(Net):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self.first(x)
            return self.last(hidden) + (hidden * 0).abs().sqrt()

    _, hits = train(TinyEngine(Between()), batches(1))
    assert (hits[0][0].phase, hits[0][0].kind) == ("backward", "nan")


def test_reduction_makes_finite_gradients_bad() -> None:
    def overflow(gradient: Tensor) -> None:
        gradient[...] = float("inf")

    engine = TinyEngine(Net(), accumulation=2, reduce=overflow)
    _, hits = train(engine, batches(2))
    found = hits[0][0]
    assert (found.step, found.micro_step, found.phase, found.kind) == (0, 1, "reduction", "inf")
    assert found.cause == "reduction-overflow"


def test_optimizer_step_makes_a_weight_bad() -> None:
    engine = TinyEngine(Net())
    original = engine._take_step

    def step() -> None:
        original()
        if engine.global_steps == 2:
            engine.module.last.weight.data[0, 0] = float("inf")  # type: ignore[union-attr, index]

    engine._take_step = step  # type: ignore[method-assign]
    _, hits = train(engine, batches(3))
    found = hits[0][0]
    assert (found.step, found.phase, found.module, found.tensor) == (1, "step", "last", "weight")
    assert found.cause == "optimizer-born"


def test_the_earliest_wins_and_is_reported_once() -> None:
    data = batches(5)
    data[1][0, 0] = data[3][0, 0] = float("nan")
    _, hits = train(TinyEngine(Net(), checks=False), data)
    assert [hit[0].step for hit in hits] == [1]


def test_a_plain_module_counts_its_forwards_as_steps() -> None:
    net = Net(nn.Sequential(nn.Linear(8, 8), Log()))
    hits: list[FirstBad] = []
    with attach(net, mode="frames", on_first_bad=lambda found, *_: hits.append(found)):
        net(batches(1)[0]).sum().backward()
        with torch.no_grad():
            net.middle[0].weight.zero_(), net.middle[0].bias.zero_()  # type: ignore[index, union-attr]
        net(batches(1)[0]).sum().backward()
    assert (hits[0].step, hits[0].micro_step, hits[0].module, hits[0].kind) == (1, 0, "middle.1", "inf")


def test_a_script_that_raises_on_the_nan_itself_is_judged_at_detach() -> None:
    net = Net()
    data = batches(1)[0]
    data[0, 0] = float("nan")
    hits: list[FirstBad] = []

    def script() -> None:
        assert net(data).isfinite().all(), "the loss is nan"

    with (
        pytest.raises(AssertionError, match="nan"),
        attach(net, mode="frames", on_first_bad=lambda f, *_: hits.append(f)),
    ):
        script()
    assert hits[0].phase == "input"


def test_weights_that_a_step_blew_up_are_the_cause_of_the_overflow_behind() -> None:
    """Finite weights of 1e23 and more after one step, whose products in the next forward are not finite.

    Behind a tanh the outputs (1e21) still are, and the loss squares them.
    """
    found = train(TinyEngine(Net(nn.Linear(8, 8)), lr=1e25), batches(3))[1][0][0]
    assert (found.step, found.phase, found.module) == (1, "forward", "last")
    assert found.cause == "exploded-weights"
    found = train(TinyEngine(Net(), lr=1e22), batches(3))[1][0][0]
    assert (found.step, found.phase, found.cause) == (1, "loss", "exploded-weights")
