"""Models and tensors that a detector could stumble over: the user's run goes on, and nothing of ours is left behind."""

from __future__ import annotations

import gc
import sys
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dsdoctor
from dsdoctor.finding import FirstBad
from dsdoctor.numerics import Detector, attach
from dsdoctor.numerics.hooks import Hook
from tests.numerics.engine import TinyEngine
from tests.numerics.test_phases import Log, Net, batches

NAN = float("nan")
MODES = pytest.mark.parametrize("mode", ["frames", "sentinel", "auto"])


def left_behind(net: nn.Module) -> list[Any]:
    """Hooks of ours on the model or its parameters."""
    hooks = [h for m in net.modules() for d in (m._forward_hooks, m._forward_pre_hooks) for h in d.values()]
    hooks += [h for p in net.parameters() for h in (p._backward_hooks or {}).values()]
    return [h for h in hooks if isinstance(h, Hook) or "dsdoctor" in getattr(h, "__module__", "")]


def checked(net: nn.Module, detector: Detector) -> None:
    """After a run: nothing failed, nothing is left."""
    detector.detach()
    assert detector.problems == []
    assert left_behind(net) == []


@MODES
def test_a_model_without_parameters(mode: Any) -> None:
    net = nn.Sequential(nn.Tanh(), Log())
    hits: list[FirstBad] = []
    detector = attach(net, mode=mode, on_first_bad=lambda found, *_: hits.append(found))
    net(torch.ones(2, requires_grad=True)).sum().backward()
    net(torch.zeros(2, requires_grad=True)).sum().backward()
    checked(net, detector)
    assert [(h.step, h.module) for h in hits] == [(1, "1")]


class Passes(nn.Module):
    """Takes and returns whatever it is given, beside something to train."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Returns()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, odd: Any, **more: Any) -> Any:
        return self.inner(odd), self.weight.sum()


class Returns(nn.Module):
    def forward(self, odd: Any) -> Any:
        return odd


ODD: dict[str, Any] = {
    "integers": torch.arange(4),
    "bools": torch.ones(2, dtype=torch.bool),
    "complex": torch.ones(2, dtype=torch.complex64),
    "conjugate": torch.ones(2, dtype=torch.complex64).conj(),
    "sparse": torch.eye(3).to_sparse(),
    "csr": torch.eye(3).to_sparse_csr(),
    "float8": torch.ones(4).to(torch.float8_e4m3fn),
    "float8 e5m2": torch.ones(4).to(torch.float8_e5m2),
    "uint16": torch.ones(2, dtype=torch.uint16),
    "meta": torch.ones(2, device="meta"),
    "empty": torch.ones(0, 3),
    "no dimension": torch.tensor(1.0),
    "strings and sets": {"a": {"x", "y"}, 3: object(), "b": ("text", None, 1.5)},
    "deeply nested": [[[[[[[[[[torch.ones(1)]]]]]]]]]],
    "nested tensor": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "inference": None,
}


@MODES
@pytest.mark.parametrize("name", ODD)
def test_odd_tensors(mode: Any, name: str) -> None:
    odd = ODD[name]
    if name == "inference":
        with torch.inference_mode():
            odd = torch.ones(2)
    net = Passes()
    detector = attach(net, mode=mode, trace_batches=[0])
    for _ in range(2):
        net(odd, more=odd)[1].backward()
    checked(net, detector)
    assert detector.first_bad is None


@MODES
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.float64])
def test_a_nan_in_an_odd_type_is_seen(mode: Any, dtype: torch.dtype) -> None:
    class Makes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.log(-1 - x.abs()).to(dtype)

    class Outer(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.makes(x).to(torch.complex64).real

    net = Outer()
    net.makes = Makes()
    engine, hits = TinyEngine(net), []
    detector = attach(engine, mode=mode, on_first_bad=lambda found, *_: hits.append(found))
    engine.backward(engine(batches(1)[0]).sum())
    checked(net, detector)
    assert [(h.phase, h.module, h.kind) for h in hits] == [("forward", "makes", "nan")]


@MODES
def test_hooks_of_others_stay_and_work(mode: Any) -> None:
    net, seen = Net(), []
    net.first.register_forward_hook(lambda m, a, out: out * 0)
    net.middle.register_forward_pre_hook(lambda m, a: seen.append(a[0]) or (a[0] + 1,))  # type: ignore[func-returns-value]
    net.last.register_full_backward_hook(lambda m, gi, go: seen.append(go))
    net.last.weight.register_hook(lambda g: g * 2)
    detector = attach(net, mode=mode)
    out = net(batches(1)[0])
    out.sum().backward()
    checked(net, detector)
    assert len(seen) == 2
    assert torch.equal(out, net.last(torch.tanh(torch.ones(4, 8))))
    assert (len(net.first._forward_hooks), len(net.middle._forward_pre_hooks)) == (1, 1)
    assert len(net.last.weight._backward_hooks or {}) == 1


@MODES
def test_a_module_that_is_replaced_in_flight(mode: Any) -> None:
    net = Net()
    detector = attach(net, mode=mode)
    for batch in batches(3):
        net(batch).sum().backward()
        old, net.middle = net.middle, nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        net.last.weight = nn.Parameter(torch.ones(8, 8))
    checked(net, detector)
    assert left_behind(old) == []


@MODES
def test_a_module_that_is_cast_in_flight(mode: Any) -> None:
    net = Net()
    detector = attach(net, mode=mode)
    net(batches(1)[0]).sum().backward()
    net.double()
    net.zero_grad()
    net(batches(1)[0].double()).sum().backward()
    checked(net, detector)


@MODES
def test_an_exception_in_forward_and_in_backward(mode: Any) -> None:
    class Fragile(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
            raise KeyError("in backward")

    class Part(nn.Module):
        fail = "forward"

        def forward(self, x: Tensor) -> Tensor:
            if self.fail == "forward":
                raise KeyError("in forward")
            return Fragile.apply(x) if self.fail == "backward" else torch.log(x * 0)  # type: ignore[no-untyped-call, no-any-return]

    net = Net(Part())
    engine, hits = TinyEngine(net), []
    detector = attach(engine, mode=mode, on_first_bad=lambda found, *_: hits.append(found))
    for where in ("forward", "backward"):
        net.middle.fail = where  # type: ignore[assignment]
        with pytest.raises(KeyError, match=f"in {where}"):
            engine.backward(engine(batches(1)[0]).sum())
    net.middle.fail = "never"  # type: ignore[assignment]
    engine.backward(engine(batches(1)[0]).sum())
    engine.step()
    checked(net, detector)
    assert [(h.phase, h.module) for h in hits] == [("forward", "middle")]


@MODES
def test_detaching_from_inside_the_callback(mode: Any) -> None:
    net = Net()
    data = batches(2)
    data[0][0, 0] = NAN
    engine, held = TinyEngine(net, checks=False), []
    detector = attach(engine, mode=mode, on_first_bad=lambda *_: held[0].detach())
    held.append(detector)
    for batch in data:
        engine.backward(engine(batch).sum())
        engine.step()
    checked(net, detector)
    assert engine.global_steps == 2


@MODES
def test_evaluation_between_training_steps(mode: Any) -> None:
    net = Net()
    engine, hits = TinyEngine(net), []
    data = batches(4)
    detector = attach(engine, mode=mode, on_first_bad=lambda found, *_: hits.append(found))
    for index, batch in enumerate(data):
        if index == 2:
            batch[0, 0] = NAN
        engine.backward(engine(batch).sum())
        with torch.no_grad():
            net(torch.full((4, 8), NAN))
        with torch.inference_mode():
            net(torch.full((4, 8), NAN))
        engine.step()
    checked(net, detector)
    assert [(h.step, h.phase) for h in hits] == [(2, "input")]


@MODES
def test_modules_called_several_times_and_shared_weights(mode: Any) -> None:
    class Shares(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 8)
            self.log = Log()
            self.last = nn.Linear(8, 8)
            self.last.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            x = torch.relu(self.first(self.log(x.abs() + 1)))
            return self.last(self.log(x - x))

    net = Shares()
    hits: list[FirstBad] = []
    detector = attach(net, mode=mode, on_first_bad=lambda found, *_: hits.append(found))
    net(batches(1)[0]).sum().backward()
    checked(net, detector)
    assert [(h.phase, h.module, h.kind) for h in hits] == [("forward", "log", "inf")]


@MODES
def test_frozen_weights_and_an_inner_model_that_is_called_directly(mode: Any) -> None:
    class Adapter(nn.Module):
        """As PEFT does: the frozen model inside, trained only through what was put into it."""

        def __init__(self) -> None:
            super().__init__()
            self.base = Net(nn.Linear(8, 8)).requires_grad_(False)
            self.base.middle.requires_grad_(True)

    net = Adapter()
    engine, hits = TinyEngine(net), []
    detector = attach(engine, mode=mode, on_first_bad=lambda found, *_: hits.append(found))
    data = batches(3)
    data[2][0, 0] = NAN
    for batch in data:
        engine.backward(net.base(batch).sum())
        engine.step()
    checked(net, detector)
    assert [(h.step, h.phase) for h in hits] == [(2, "input")]


@MODES
def test_scripted_parts(mode: Any) -> None:
    net = Net(torch.jit.script(nn.Linear(8, 8)))
    detector = attach(net, mode=mode)
    net(batches(1)[0]).sum().backward()
    checked(net, detector)
    with pytest.raises(TypeError, match="takes no hooks"):
        attach(torch.jit.script(nn.Linear(8, 8)), mode=mode)


@MODES
def test_a_compiled_model_trains_on(mode: Any) -> None:
    torch._dynamo.reset()
    net = Net()
    compiled = torch.compile(net, backend="eager")
    detector = attach(compiled, mode=mode)
    for batch in batches(2):
        compiled(batch).sum().backward()
    checked(net, detector)


@pytest.mark.parametrize("wrap", [lambda net: nn.DataParallel(net), lambda net: nn.Sequential(nn.DataParallel(net))])
def test_data_parallel_is_refused_wherever_it_is(wrap: Any) -> None:
    net = Net()
    with pytest.raises(TypeError, match="DistributedDataParallel"):
        dsdoctor.attach(wrap(net))
    assert left_behind(net) == []


def test_detect_overflow_reads_any_tensor(capsys: pytest.CaptureFixture[str]) -> None:
    for name, odd in ODD.items():
        if isinstance(odd, Tensor):
            assert not dsdoctor.detect_overflow(odd, name)
    assert dsdoctor.detect_overflow(torch.tensor([1.0, NAN, float("inf")]), "after ffn")
    assert capsys.readouterr().out == "after ffn has nans\nafter ffn has infs\n"


@MODES
def test_nothing_of_a_run_lives_on_after_it(mode: Any) -> None:
    """A graph's nodes hold their hooks, and a hook that knows its node keeps both for ever."""
    net = Net()
    engine = TinyEngine(net)
    detector = attach(engine, mode=mode)
    for batch in batches(2):
        engine.backward(torch.log(engine(batch).pow(2).sum() + 1))
        engine.step()
    model, watching = weakref.ref(net), weakref.ref(detector)
    detector.detach()
    del net, engine, detector
    gc.collect()
    assert (model(), watching()) == (None, None)


@MODES
def test_a_root_that_calls_itself_is_one_batch(mode: Any) -> None:
    class Tree(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor, depth: int = 3) -> Tensor:
            out: Tensor = self(self.layer(x), depth - 1) if depth else x
            return out

    net = Tree()
    engine, hits = TinyEngine(net), []
    detector = attach(engine, mode=mode, on_first_bad=lambda found, *_: hits.append(found))
    data = batches(3)
    data[2][0, 0] = NAN
    for batch in data:
        engine.backward(engine(batch).sum())
        engine.step()
    assert detector.clock.batch == 2
    checked(net, detector)
    assert [(h.step, h.phase) for h in hits] == [(2, "input")]
    assert detector.warnings == []


@MODES
def test_a_forward_that_was_left_by_sys_exit(mode: Any) -> None:
    net = Net()
    detector = attach(net, mode=mode)
    handle = net.middle.register_forward_hook(lambda *_: sys.exit(1))
    with pytest.raises(SystemExit):
        net(batches(1)[0])
    handle.remove()
    for batch in batches(2):
        net(batch).sum().backward()
    assert detector.clock.batch == 2
    checked(net, detector)


@MODES
def test_transformations_of_torch_func_and_swapped_weights(mode: Any) -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    detector = attach(net, mode=mode, on_first_bad=lambda *_: None)
    weights = {name: weight.detach() for name, weight in net.named_parameters()}
    x = batches(1)[0]

    def loss(given: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(net, given, (x,)).sum()

    torch.func.grad(loss)(weights)
    torch.func.vmap(lambda row: torch.func.functional_call(net, weights, (row,)))(x)
    checked(net, detector)
    assert detector.first_bad is None


@MODES
def test_lazy_layers_are_refused_before_a_hook_is_set(mode: Any) -> None:
    net = nn.Sequential(nn.LazyLinear(8))
    with pytest.raises(ValueError, match="lazy layers"):
        attach(net, mode=mode)
    assert left_behind(net) == []
    net(batches(1)[0])
    checked(net, attach(net, mode=mode))


def test_frames_of_compiled_code_are_warned_of() -> None:
    torch._dynamo.reset()
    before = torch.compile(Net(), backend="eager")
    with attach(before, mode="frames") as detector:
        assert len(detector.warnings) == 1
    net = Net()
    engine = TinyEngine(net)
    with attach(engine, mode="frames") as detector:
        net.compile(backend="eager")
        for batch in batches(2):
            engine.backward(engine(batch).sum())
            engine.step()
    assert len(detector.warnings) == 1
    assert detector.warnings[0].startswith("compiled code runs without the hooks")
