"""The numbers that a run writes: each tensor once, in order, and nothing of the run changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from dsdoctor.numerics import attach, recording
from dsdoctor.numerics.fingerprint import digest, fingerprint
from dsdoctor.numerics.numbers import Number, Numbers, path_of, read
from tests.numerics.engine import TinyEngine
from tests.numerics.test_odd_models import ODD, Passes, left_behind
from tests.numerics.test_phases import Net, batches


def numbers(folder: Path) -> Numbers:
    return read(path_of(folder, 0))


def trained(folder: Path | None, net: nn.Module, *, mode: Any = "frames", steps: int = 2, **more: Any) -> list[float]:
    engine, losses = TinyEngine(net, **more), []
    detector = attach(engine, mode=mode, record=str(folder) if folder is not None else None)
    for batch in batches(steps):
        loss = engine(batch).pow(2).mean()
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    detector.detach()
    assert detector.problems == []
    assert left_behind(net) == []
    return losses


@pytest.mark.parametrize("mode", ["frames", "sentinel", "auto"])
def test_what_came_to_be_in_which_order(tmp_path: Path, mode: Any) -> None:
    trained(tmp_path, Net(), mode=mode)
    found = numbers(tmp_path)
    assert found.whole
    places = [(n.phase, n.module, n.tensor) for n in found.values if n.step == 0]
    first = places.index(("parameter", "first", "weight"))
    assert places[0] == ("input", "", "input[0]")
    assert first < places.index(("forward", "first", "output")) < places.index(("parameter", "last", "weight"))
    assert places.index(("backward", "last", "output.grad")) < places.index(("backward", "first", "weight.grad"))
    assert len(set(places)) == len(places), "each tensor once"
    assert next(n.phase for n in found.values if n.step == 1) == "input"
    assert {n.batch for n in found.values} == {0, 1}


def test_losses_are_the_same_with_and_without(tmp_path: Path) -> None:
    def net() -> nn.Module:
        torch.manual_seed(0)
        return Net(nn.Sequential(nn.Dropout(0.2), nn.Linear(8, 8)))

    assert trained(tmp_path, net(), steps=10) == trained(None, net(), steps=10)


def test_the_loss_scale_is_divided_out(tmp_path: Path) -> None:
    for name, scale in (("plain", 0.0), ("scaled", 256.0)):
        torch.manual_seed(0)
        trained(tmp_path / name, Net(), steps=1, scale=scale)
    plain, scaled = (
        {(n.module, n.tensor): n.high for n in numbers(tmp_path / name).values if n.phase == "backward"}
        for name in ("plain", "scaled")
    )
    assert plain.keys() == scaled.keys()
    assert all(scaled[key] == pytest.approx(plain[key], rel=1e-5) for key in plain)


def test_micro_steps_and_weights_once_a_step(tmp_path: Path) -> None:
    trained(tmp_path, Net(), steps=4, accumulation=2)
    values = numbers(tmp_path).values
    weights = [(n.step, n.micro_step) for n in values if (n.module, n.tensor) == ("first", "weight")]
    assert weights == [(0, 0), (1, 0)]
    assert [(n.step, n.micro_step) for n in values if n.phase == "input"] == [(0, 0), (0, 1), (1, 0), (1, 1)]


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_forward_that_runs_again_in_backward_is_written_once(tmp_path: Path, reentrant: bool) -> None:
    class Checkpointed(Net):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self.first(x)
            out: Tensor = self.last(checkpoint(self.middle, hidden, use_reentrant=reentrant))
            return out

    trained(tmp_path, Checkpointed(nn.Linear(8, 8)), steps=1)
    places = [(n.phase, n.module, n.tensor) for n in numbers(tmp_path).values]
    assert places.count(("forward", "middle", "output")) == 1
    assert places.count(("backward", "middle", "weight.grad")) == 1
    assert places.count(("backward", "middle", "output.grad")) == 1


def test_the_same_contents_in_another_tensor_are_no_new_input(tmp_path: Path) -> None:
    class Copies(Net):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.last(self.middle(self.first(x).clone()) + 1)
            return out

    trained(tmp_path, Copies(nn.Linear(8, 8)), steps=1)
    inputs = [(n.module, n.tensor) for n in numbers(tmp_path).values if n.tensor == "input[0]"]
    assert inputs == [("", "input[0]"), ("last", "input[0]")]


def test_evaluation_is_left_out(tmp_path: Path) -> None:
    net = Net()
    with attach(net, mode="frames", record=str(tmp_path)):
        with torch.no_grad():
            net(batches(1)[0])
        net(batches(1)[0]).sum().backward()
    assert {n.batch for n in numbers(tmp_path).values} == {1}


@pytest.mark.parametrize("name", ODD)
def test_odd_tensors(tmp_path: Path, name: str) -> None:
    net = Passes()
    odd = ODD[name] if name != "inference" else torch.inference_mode()(lambda: torch.ones(2))()
    detector = attach(net, mode="sentinel", record=str(tmp_path))
    net(odd, more=odd)[1].backward()
    detector.detach()
    assert detector.problems == []
    assert any(n.tensor == "weight.grad" for n in numbers(tmp_path).values)


class Wrapped(Tensor):
    """A tensor that holds another one and has no storage of its own."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapped:
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined, no-any-return]

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = tree_map(lambda x: x.inner if isinstance(x, Wrapped) else x, (args, kwargs or {}))
        return tree_map(lambda x: Wrapped(x) if isinstance(x, Tensor) else x, func(*plain[0], **plain[1]))


def test_a_subclass_without_storage_has_the_digest_of_what_it_holds() -> None:
    values = torch.randn(30, 30)
    assert fingerprint(Wrapped(values)) == fingerprint(values)


def test_it_stops_at_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (recording, __import__("dsdoctor.numerics.numbers", fromlist=["MOST"])):
        monkeypatch.setattr(module, "MOST", 20)
    trained(tmp_path, Net(), steps=4)
    found = numbers(tmp_path)
    assert len(found.values) == 20
    assert not found.whole


def test_a_folder_that_cannot_be_written_leaves_no_hook(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    net = Net()
    with pytest.raises(OSError, match="file"):
        attach(net, record=str(tmp_path / "file" / "below"))
    assert left_behind(net) == []


def test_the_digest_knows_bits_and_places() -> None:
    whole = torch.randn(40, 100)
    assert digest(whole) == digest(whole.clone())
    assert digest(whole) == digest(whole.t().contiguous().t()), "whatever the layout"
    assert digest(whole[1:]) == digest(whole[1:].clone()), "wherever it begins"
    assert digest(whole.half()[0, 1:]) == digest(whole.half()[0, 1:].clone())
    swapped = whole[[1, 0, *range(2, 40)]]
    changed = whole.clone()
    changed[39, 99] = torch.nextafter(changed[39, 99], torch.tensor(9.0))
    assert len({digest(whole), digest(swapped), digest(changed)}) == 3


def test_a_norm_that_does_not_fit_is_none() -> None:
    found = fingerprint(torch.full((4,), 1e30))
    assert found is not None
    assert (found.high, found.norm) == (pytest.approx(1e30), None)
    assert Number(0, 0, 0, "forward", "", "x", "float32", 4, found.low, found.high, found.norm, found.digest).line()
