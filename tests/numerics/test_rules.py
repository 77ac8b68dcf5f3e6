"""What is no fault and must stay silent, and what the loss-scale search may hide."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import subprocess
import sys
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dsdoctor.finding import FirstBad
from dsdoctor.numerics import attach
from tests.numerics.engine import TinyEngine
from tests.numerics.test_phases import Log, Net, batches, train

INF = float("inf")


class Causal(nn.Module):
    """Returns an additive mask of 0 and -inf."""

    def forward(self, size: int) -> Tensor:
        return torch.full((size, size), -INF).triu(1)


class Attention(nn.Module):
    """Attention over the rows of a batch, with a mask that a submodule makes."""

    def __init__(self, mask: nn.Module) -> None:
        super().__init__()
        self.mask = mask
        self.scores = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.softmax(self.scores(x) @ x.T + self.mask(len(x)), dim=-1)
        return weights @ x


class Masked(nn.Module):
    """Returns scores of which some are masked on purpose: not a mask by its look."""

    def forward(self, x: Tensor) -> Tensor:
        return x.masked_fill(torch.eye(*x.shape, dtype=torch.bool), -INF)


class Softmax(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(x, dim=-1)


def hits_of(engine: TinyEngine, data: list[Tensor], **options: Any) -> list[FirstBad]:
    return [hit[0] for hit in train(engine, data, **options)[1]]


@pytest.mark.parametrize("middle", [Attention(Causal()), nn.Sequential(Masked(), Softmax())], ids=["mask", "scores"])
def test_deliberate_minus_inf_is_silent(middle: nn.Module) -> None:
    assert hits_of(TinyEngine(Net(middle)), batches(3)) == []


@pytest.mark.parametrize("middle", [Attention(Causal()), nn.Sequential(Masked(), Softmax())], ids=["mask", "scores"])
def test_a_deliberate_minus_inf_is_not_blamed_for_an_unrelated_fault(middle: nn.Module) -> None:
    net = Net(nn.Sequential(middle, nn.Linear(8, 8), Log()))
    nn.init.zeros_(net.middle[1].weight), nn.init.zeros_(net.middle[1].bias)  # type: ignore[index, union-attr, arg-type]
    assert [(h.module, h.op) for h in hits_of(TinyEngine(net), batches(1))] == [("middle.2", "aten.log")]


def test_a_row_that_is_masked_entirely_is_found_where_it_turns_into_nan() -> None:
    class AllMasked(nn.Module):
        def forward(self, size: int) -> Tensor:
            mask = torch.zeros(size, size)
            mask[1] = -INF
            return mask

    found = hits_of(TinyEngine(Net(Attention(AllMasked()))), batches(1))[0]
    assert (found.module, found.kind, found.op, found.cause) == ("middle", "nan", "aten._softmax", "masked-row")


def test_a_mask_in_the_batch_is_silent() -> None:
    class WithBias(Net):
        def forward(self, x: Tensor) -> Tensor:
            return torch.softmax(self.last(x[:, :8]) + x[:, 8:], dim=-1)

    mask = torch.zeros(4, 8)
    mask[:, 6:] = -INF
    slopes = mask - torch.arange(8.0)
    for bias in (mask, slopes):
        assert hits_of(TinyEngine(WithBias()), [torch.cat([b, bias], dim=1) for b in batches(2)]) == []


def test_a_nan_that_nothing_uses_is_silent() -> None:
    class Branch(Net):
        def __init__(self) -> None:
            super().__init__()
            self.thrown_away = Log()

        def forward(self, x: Tensor) -> Tensor:
            self.thrown_away(x * 0), self.thrown_away((x * 0) / 0)
            return super().forward(x)

    assert hits_of(TinyEngine(Branch()), batches(3)) == []


def test_what_was_harmless_before_is_not_blamed_later() -> None:
    class Branch(Net):
        def __init__(self) -> None:
            super().__init__(nn.Sequential(nn.Linear(8, 8), Log()))
            self.thrown_away = Log()

        def forward(self, x: Tensor) -> Tensor:
            self.thrown_away(x * 0)
            return super().forward(x)

    net = Branch()
    engine = TinyEngine(net)
    hits: list[FirstBad] = []
    with attach(engine, mode="frames", on_first_bad=lambda found, *_: hits.append(found)):
        for step, batch in enumerate(batches(3)):
            if step == 2:
                nn.init.zeros_(net.middle[0].weight), nn.init.zeros_(net.middle[0].bias)  # type: ignore[index, union-attr, arg-type]
            engine.backward(engine(batch).sum())
            engine.step()
    assert [(h.step, h.module) for h in hits] == [(2, "middle.1")]


def test_gradients_that_overflow_while_the_scale_is_searched_are_silent() -> None:
    engine = TinyEngine(Net().half(), scale=2.0**24)
    assert hits_of(engine, [b.half() for b in batches(16)]) == []
    assert 0 < engine.skipped_steps < 16, "the search has to overflow first and then settle"


def test_an_engine_that_gives_up_above_the_floor_we_assumed() -> None:
    """A scale whose floor cannot be read: the exception of the step decides."""
    engine, hits = TinyEngine(Net(Singular()), scale=64.0, floor=16.0), []
    scaler = engine.optimizer.loss_scaler
    engine.optimizer.loss_scaler = SimpleNamespace(scale=0.0)
    engine.optimizer.cur_scale = 64.0

    def take_step() -> None:
        engine.optimizer.overflow = True
        engine.optimizer.cur_scale /= 2
        if engine.optimizer.cur_scale < scaler.min_scale:
            raise RuntimeError("already at minimum")
        engine.skipped_steps += 1
        engine.global_steps += 1

    def script() -> None:
        for batch in batches(4):
            engine(batch).sum().backward()
            engine.step()

    engine._take_step = take_step  # type: ignore[method-assign]
    with (
        attach(engine, mode="frames", on_first_bad=lambda f, *_: hits.append(f)),
        pytest.raises(RuntimeError, match="minimum"),
    ):
        script()
    assert [(h.step, h.phase, h.module) for h in hits] == [(0, "backward", "middle")]


class Singular(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sqrt((x * 0).pow(2)) + x


def test_gradients_bad_down_to_the_floor_of_the_scale_are_found_where_they_began() -> None:
    class Later(nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return Singular()(x) if self.calls > 2 else x

    engine, hits = TinyEngine(Net(Later()), scale=16.0), []
    with attach(engine, mode="frames", on_first_bad=lambda found, *_: hits.append(found)):
        for step, batch in enumerate(batches(7)):
            assert bool(hits) == (step > 6), "certain only once the scale sits at its floor"
            engine.backward(engine(batch).sum())
            if step < 6:
                engine.step()
    assert (hits[0].step, hits[0].phase, hits[0].module) == (2, "backward", "middle")


def test_forward_overflow_is_a_finding_at_any_scale() -> None:
    net = Net(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))).half()
    nn.init.constant_(net.middle[0].weight, 6e4)  # type: ignore[index, union-attr, arg-type]
    nn.init.ones_(net.first.weight)  # so that eight inputs near 1 are summed up
    found = hits_of(TinyEngine(net, scale=2.0**16), [b.half().abs() for b in batches(2)])[0]
    assert (found.step, found.phase, found.module, found.kind) == (0, "forward", "middle.0", "inf")
    assert (found.op, found.cause) == ("aten.addmm", "overflow")


def test_reduction_overflow_of_a_searched_scale_is_silent() -> None:
    def overflow_above(gradient: Tensor) -> None:
        if engine.optimizer.loss_scaler.cur_scale > 4:
            gradient[...] = INF

    engine = TinyEngine(Net(), scale=16.0, reduce=overflow_above)
    assert hits_of(engine, batches(6)) == []
    assert engine.skipped_steps == 2


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_is_not_another_forward(reentrant: bool) -> None:
    class Checkpointed(Net):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self.first(x)
            return self.last(checkpoint(self.middle, hidden, use_reentrant=reentrant))

    net = Checkpointed(nn.Sequential(nn.Linear(8, 8), nn.Tanh()))
    engine = TinyEngine(net)
    reports: list[str] = []
    with attach(engine, mode="frames", max_frames=100, on_first_bad=lambda _, report, __: reports.append(report)):
        for step, batch in enumerate(batches(2)):
            batch[0, 0] = float("nan") if step else 1.0
            engine.backward(engine(batch).sum())
            engine.step()
    assert reports[0].count("middle.0 Linear\n") == 1, "the first batch's forward"
    assert reports[0].count("middle.0 Linear (recomputed)\n") == 1, "and its recomputation, marked"
    assert "batch_number=1" in reports[0], "a recomputation is no batch"


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradients_are_watched_through_checkpointing(reentrant: bool) -> None:
    class Checkpointed(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.last(checkpoint(self.middle, self.first(x), use_reentrant=reentrant))

    found = hits_of(TinyEngine(Checkpointed(nn.Sequential(nn.Tanh(), Singular()))), batches(1))[0]
    assert (found.phase, found.module) == ("backward", "middle.1")


def test_evaluation_is_not_judged() -> None:
    net = Net()
    bad = torch.full((4, 8), float("nan"))
    hits: list[FirstBad] = []
    with attach(net, mode="frames", on_first_bad=lambda found, *_: hits.append(found)), torch.no_grad():
        net(bad), net(bad)
    assert hits == []


def test_losses_are_the_same_with_and_without() -> None:
    def losses(observed: bool) -> list[float]:
        torch.manual_seed(7)
        middle = nn.Sequential(nn.Dropout(0.3), nn.BatchNorm1d(8), Attention(Causal()), Masked(), Softmax())
        engine, values = TinyEngine(Net(middle), accumulation=2), []
        detector = attach(engine) if observed else None
        for batch in batches(20, seed=8):
            loss = engine(batch).pow(2).mean()
            values.append(loss.item())
            engine.backward(loss)
            engine.step()
        if detector is not None:
            detector.detach()
            assert detector.first_bad is None
            assert detector.problems == []
        return values

    assert losses(True) == losses(False)


def test_a_replay_leaves_no_trace() -> None:
    """Random numbers, running statistics, counters and lists of the module are as if it ran once."""

    class Stateful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(8)
            self.calls, self.history = 0, [0]

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.history.append(self.calls)
            noise = torch.rand_like(x)
            return torch.log(torch.relu(self.norm(x)) * noise)

    def state(observed: bool) -> tuple[Any, ...]:
        torch.manual_seed(1)
        module = Stateful()
        detector = attach(module, mode="frames") if observed else None
        module(batches(1)[0])
        if detector is not None:
            assert detector._ledger.earliest() is not None, "the module was suspected, so it ran again"
            assert detector._ledger.earliest().origin.op == "aten.log"  # type: ignore[union-attr]
            detector.detach()
        norm = module.norm
        return module.calls, module.history, norm.num_batches_tracked.item(), norm.running_mean, torch.rand(3)

    for ours, theirs in zip(state(True), state(False), strict=True):
        assert torch.equal(ours, theirs) if isinstance(ours, Tensor) else ours == theirs


def test_detach_takes_everything_back() -> None:
    net = Net()
    engine = TinyEngine(net)
    before = {name: copy.copy(value) for name, value in net.__dict__.items()}, set(engine.__dict__)
    detector = attach(engine)
    engine.backward(engine(batches(1)[0]).sum())
    detector.detach()
    detector.detach()
    for module in net.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    assert all(not parameter._backward_hooks for parameter in net.parameters())
    assert (dict(net.__dict__), set(engine.__dict__)) == before


def test_a_second_detector_is_refused_until_the_first_is_gone() -> None:
    net = Net()
    with attach(net), pytest.raises(ValueError, match="already"):
        attach(TinyEngine(net))
    attach(net).detach()


def test_data_parallel_is_refused() -> None:
    with pytest.raises(TypeError, match="DistributedDataParallel"):
        attach(nn.DataParallel(Net()))


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(TypeError, match="not int"):
        attach(3)


def test_an_exception_in_forward_leaves_the_detector_in_order() -> None:
    class Fragile(nn.Module):
        fail = True

        def forward(self, x: Tensor) -> Tensor:
            if self.fail:
                raise KeyError("broken")
            return torch.log(x.abs() * 0)

    net = Net(Fragile())
    hits: list[FirstBad] = []
    with attach(net, mode="frames", on_first_bad=lambda found, *_: hits.append(found)) as detector:
        with pytest.raises(KeyError, match="broken"):
            net(batches(1)[0])
        assert not detector._watches.forward._stack
        net.middle.fail = False  # type: ignore[union-attr, assignment]
        net(batches(1)[0]).sum().backward()
    assert [(h.module, h.phase) for h in hits] == [("middle", "forward")]
    assert detector.problems == []


def test_a_failing_callback_does_not_reach_the_script() -> None:
    def broken(*_: Any) -> None:
        raise OSError("disk full")

    data = batches(1)[0]
    data[0, 0] = float("nan")
    engine = TinyEngine(Net())
    with attach(engine, mode="frames", on_first_bad=broken) as detector:
        engine.backward(engine(data).sum())
    assert detector.problems == ["OSError: disk full"]


def test_nothing_keeps_activations_alive() -> None:
    kept: list[weakref.ref[Tensor]] = []

    class Spy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            out = torch.log(torch.relu(x))
            kept.append(weakref.ref(out))
            return out

    net = Net(nn.Sequential(Spy(), nn.Tanh()))
    with attach(net, mode="frames", on_first_bad=lambda *_: None):
        for batch in batches(2):
            net(batch).sum().backward()
        gc.collect()
        assert [ref() for ref in kept if ref() is not None] == []


def test_copies_and_pickles_of_a_watched_model_are_free_of_the_detector() -> None:
    net = Net()
    data = batches(1)[0]
    data[0, 0] = float("nan")
    with attach(net) as detector:
        twins = [copy.deepcopy(net), pickle.loads(pickle.dumps(net))]
        buffer = io.BytesIO()
        torch.save(net, buffer)
        for twin in twins:
            twin(data)
        assert detector.clock.batch == -1
    for twin in twins:
        attach(twin).detach()


def test_the_report_goes_to_stderr_and_the_run_goes_on(capfd: pytest.CaptureFixture[str]) -> None:
    data = batches(2)
    data[0][0, 0] = float("nan")
    engine = TinyEngine(Net())
    with attach(engine):
        for batch in data:
            engine.backward(engine(batch).sum())
            engine.step()
    out, err = capfd.readouterr()
    assert out == ""
    assert "phase input" in err
    assert engine.global_steps == 2


def test_trace_and_abort(capfd: pytest.CaptureFixture[str]) -> None:
    net, seen = Net(), []

    def script() -> None:
        for batch in batches(5):
            seen.append(batch)
            net(batch).sum().backward()

    with attach(net, trace_batches=[1], abort_after_batch=2), pytest.raises(ValueError, match="batch 2"):
        script()
    assert len(seen) == 3
    err = capfd.readouterr().err
    assert err.count("first Linear") == 1
    assert "*** Starting batch number=1 ***" in err


def test_a_script_that_ends_on_a_nan_is_judged_at_exit() -> None:
    script = """
import torch
from torch import nn
import dsdoctor

net = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
dsdoctor.attach(net)
net(torch.full((1, 2), float("nan")))
raise SystemExit("the loss is nan")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert "phase input" in done.stderr
