"""The always-on watch: what it names, that it reads nothing on the way, and what follows a hit."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from dsdoctor.finding import FirstBad
from dsdoctor.numerics import attach
from dsdoctor.numerics.points import blocks
from tests.numerics.engine import TinyEngine
from tests.numerics.test_phases import Log, batches, train
from tests.numerics.test_rules import Attention, Causal, Singular
from tests.numerics.test_transformers import MODELS

NAN = float("nan")
BOTH = pytest.mark.parametrize("mode", ["sentinel", "auto"])


class Stack(nn.Module):
    """A list of blocks, as decoders have."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 8)
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Block(nn.Module):
    """One layer with a part that a test chooses."""

    def __init__(self, part: nn.Module | None = None) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.part = part or nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.part(self.up(x))


class Fails(nn.Module):
    """log of zero in one call, counted from 0."""

    def __init__(self, call: int) -> None:
        super().__init__()
        self.call, self.calls = call, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return torch.log(x * 0) if self.calls == self.call + 1 else x


def hit(engine: TinyEngine, data: list[Tensor], **options: Any) -> FirstBad | None:
    detector, hits = train(engine, data, **options)
    assert len(hits) <= 1
    assert detector.problems == []
    return hits[0][0] if hits else None


def test_blocks_are_what_stands_beside_or_in_a_list() -> None:
    names = [name for name, _ in blocks(Stack(Block(), Block()))]
    assert names == ["embed", "layers.0", "layers.1", "head"]
    names = [name for name, _ in blocks(MODELS["llama"]())]
    assert names == [
        "model.embed_tokens",
        "model.layers.0",
        "model.layers.1",
        "model.norm",
        "model.rotary_emb",
        "lm_head",
    ]
    names = [name for name, _ in blocks(nn.Sequential(nn.Sequential(Block(), nn.Tanh()), nn.Linear(8, 8)))]
    assert names == ["0.0", "0.1", "1"]


@BOTH
@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_value_of_the_forward(mode: Any, accumulation: int) -> None:
    """The sentinel names block, step and micro-step; a second run of the batch adds module and operation."""
    net = Stack(Block(), Block(Fails(4)))
    found = hit(TinyEngine(net, accumulation=accumulation), batches(9), mode=mode)
    assert found is not None
    assert (found.step, found.micro_step) == divmod(4, accumulation)
    assert (found.phase, found.kind) == ("forward", "inf")
    # the second run's call is counted too, so it does not fail: what a module counts cannot be played again
    assert found.module == "layers.1"


def test_a_second_run_finds_module_operation_and_cause() -> None:
    data = batches(4)
    data[2].zero_()
    net = Stack(Block(), Block(nn.Sequential(nn.Tanh(), Log())))
    nn.init.zeros_(net.embed.bias), nn.init.zeros_(net.layers[1].up.bias)  # type: ignore[arg-type, union-attr]
    nn.init.zeros_(net.layers[0].up.bias)  # type: ignore[arg-type, union-attr]
    detector, hits = train(TinyEngine(net, accumulation=2, lr=0.0), data, mode="auto")
    (found, report, _) = hits[0]
    assert (found.step, found.micro_step, found.module) == (1, 0, "layers.1.part.1")
    assert (found.op, found.cause) == ("aten.log", "domain")
    assert "layers.1.part.0 Tanh" in report
    assert detector.first_bad == detector.again


def test_a_second_run_has_the_random_numbers_and_buffers_of_the_first() -> None:
    """Only with the same dropout is there a zero for the log; counters and running statistics stay what they were."""

    def build() -> Stack:
        torch.manual_seed(3)
        return Stack(Block(nn.Sequential(nn.BatchNorm1d(8), nn.Dropout(0.02), Log())))

    def state(mode: Any) -> list[Tensor]:
        net, hits, numbers = build(), [], []
        engine = TinyEngine(net, lr=0.0)
        detector = attach(engine, mode=mode, on_first_bad=lambda *hit: hits.append(hit)) if mode else None
        for index, batch in enumerate(batches(12)):
            torch.manual_seed(index)
            engine.backward(engine(batch).sum())
            engine.step()
            numbers.append(torch.rand(1))
        if detector is not None:
            detector.detach()
            assert (hits[0][0].module, hits[0][0].op) == ("layers.0.part.2", "aten.log")
        return [*numbers, net.layers[0].part[0].num_batches_tracked]  # type: ignore[union-attr, index]

    assert all(torch.equal(ours, theirs) for ours, theirs in zip(state("auto"), state(None), strict=True))


@BOTH
def test_a_bad_batch_is_named_as_input(mode: Any) -> None:
    data = batches(4)
    data[3][1, 2] = NAN
    found = hit(TinyEngine(Stack(Block()), accumulation=2), data, mode=mode)
    assert found is not None
    assert (found.step, found.micro_step, found.phase, found.tensor) == (1, 1, "input", "input[0]")
    assert found.cause == "bad-input"


@BOTH
def test_a_loss_outside_the_model(mode: Any) -> None:
    _, hits = train(TinyEngine(Stack(Block())), batches(2), lambda out: torch.log(out.sum() * 0 - 1), mode=mode)
    assert (hits[0][0].phase, hits[0][0].tensor, hits[0][0].kind) == ("loss", "loss", "nan")


@BOTH
def test_a_gradient_is_charged_to_the_block_that_used_the_value(mode: Any) -> None:
    found = hit(TinyEngine(Stack(Block(), Block(Singular()), Block())), batches(2), mode=mode)
    assert found is not None
    assert (found.step, found.phase, found.module) == (0, "backward", "layers.1.up")
    assert found.cause == "backward-singularity"


@BOTH
def test_weights_that_a_step_made_bad(mode: Any) -> None:
    engine = TinyEngine(Stack(Block()))
    original = engine._take_step

    def step() -> None:
        original()
        if engine.global_steps == 2:
            engine.module.head.weight.data[0, 0] = float("inf")  # type: ignore[union-attr, index]

    engine._take_step = step  # type: ignore[method-assign]
    found = hit(engine, batches(4), mode=mode)
    assert found is not None
    assert (found.step, found.phase, found.module, found.tensor) == (1, "step", "head", "weight")
    assert found.cause == "optimizer-born"


@BOTH
def test_weights_that_were_bad_from_the_start(mode: Any) -> None:
    net = Stack(Block())
    net.head.weight.data[0, 0] = NAN
    found = hit(TinyEngine(net), batches(2), mode=mode)
    assert found is not None
    assert (found.step, found.phase, found.module, found.cause) == (0, "parameter", "head", "corrupted-weights")


@BOTH
def test_a_scale_that_is_searched_is_silent(mode: Any) -> None:
    engine = TinyEngine(Stack(Block()).half(), scale=2.0**24)
    assert hit(engine, [b.half() for b in batches(16)], mode=mode) is None
    assert engine.skipped_steps > 0


@BOTH
def test_deliberate_masks_are_silent(mode: Any) -> None:
    assert hit(TinyEngine(Stack(Block(Attention(Causal())), Block())), batches(4), mode=mode) is None


@BOTH
def test_losses_are_the_same_with_and_without(mode: Any) -> None:
    def losses(observed: bool) -> list[float]:
        torch.manual_seed(7)
        engine, values = TinyEngine(Stack(Block(nn.Dropout(0.3)), Block()), accumulation=2), []
        detector = attach(engine, mode=mode) if observed else None
        for batch in batches(20, seed=8):
            loss = engine(batch).pow(2).mean()
            values.append(loss.item())
            engine.backward(loss)
            engine.step()
        if detector is not None:
            detector.detach()
            assert (detector.first_bad, detector.problems, detector.warnings) == (None, [], [])
        return values

    assert losses(True) == losses(False)


class Reads(TorchDispatchMode):
    """Counts what makes the host wait for a device, and copies to the host."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func._opname in ("_local_scalar_dense", "is_nonzero", "nonzero", "equal")
        return func(*args, **(kwargs or {}))


@BOTH
def test_forward_and_backward_read_nothing(mode: Any) -> None:
    net = Stack(Block(), Block())
    engine = TinyEngine(net)
    with attach(engine, mode=mode):
        for batch in batches(3):
            with Reads() as reads:
                engine.backward(engine(batch).sum())
            assert reads.count == 0
            engine.step()


@BOTH
def test_nothing_keeps_tensors_alive(mode: Any) -> None:
    kept: list[weakref.ref[Tensor]] = []

    class Spy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            out = torch.tanh(x)
            kept.append(weakref.ref(out))
            return out

    engine = TinyEngine(Stack(Block(Spy())))
    with attach(engine, mode=mode):
        for batch in batches(3):
            engine.backward(engine(batch).sum())
            engine.step()
            kept.append(weakref.ref(batch))
        del batch
        gc.collect()
        assert [ref() for ref in kept if ref() is not None] == []


def test_a_script_that_never_steps_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("ring", "sentinel"):
        monkeypatch.setattr(f"dsdoctor.numerics.{module}.LIMIT", 512)
    engine = TinyEngine(Stack(Block()))
    with attach(engine, mode="sentinel") as detector:
        most = 0
        for batch in batches(1) * 100:
            engine.backward(engine(batch).sum())
            assert detector._watches.sentinel is not None
            most = max(most, len(detector._watches.sentinel._notes))
    assert 256 < most < 512
    assert detector.problems == []


def test_where_the_batch_cannot_be_run_again_the_next_ones_are_framed(capfd: pytest.CaptureFixture[str]) -> None:
    class InPlace(Stack):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.add_(0))

    data = [batch * 0 for batch in batches(4)]
    net = InPlace(Block(nn.Sequential(nn.Tanh(), Log())))
    for layer in (net.embed, net.layers[0].up):  # type: ignore[union-attr]
        nn.init.zeros_(layer.bias)  # type: ignore[arg-type, union-attr]
    detector, hits = train(TinyEngine(net, lr=0.0), data, mode="auto")
    (found, report, _) = hits[0]
    assert (found.step, found.module) == (0, "layers.0")
    assert "not run again: its inputs were overwritten" in report
    assert detector.again is not None
    assert (detector.again.step, detector.again.module, detector.again.op) == (1, "layers.0.part.1", "aten.log")
    assert "It came back in a later batch" in capfd.readouterr().err


def test_compiled_code_that_runs_without_the_hooks_is_noticed() -> None:
    torch._dynamo.reset()
    net = Stack(Block(), Block())
    compiled = torch.compile(net, backend="eager")
    compiled(batches(1)[0]).sum().backward()
    with attach(compiled, mode="sentinel") as detector:
        for batch in batches(2):
            compiled(batch).sum().backward()
    assert len(detector.warnings) == 1
    assert "skip_nnmodule_hook_guards" in detector.warnings[0]


def test_steps_of_which_nothing_is_heard_are_noticed() -> None:
    """As with CUDA graphs, which play kernels again without Python."""
    engine = TinyEngine(Stack(Block()))
    for parameter in engine.module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with attach(engine, mode="sentinel") as detector:
        engine.step()
    assert len(detector.warnings) == 1
    assert "heard of 0 of 3 blocks" in detector.warnings[0]


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.full)])
def test_compiled_code_reports_where_the_hooks_came_first(backend: str) -> None:
    """In one graph, without a break: `fullgraph` would raise."""
    torch._dynamo.reset()
    net = Stack(Block(), Block(nn.Sequential(nn.Tanh(), Log())), Block())
    for layer in (net.embed, net.layers[0].up, net.layers[1].up):  # type: ignore[union-attr]
        nn.init.zeros_(layer.bias)  # type: ignore[arg-type, union-attr]
    engine, hits = TinyEngine(net, lr=0.0), []
    with attach(engine, mode="sentinel", on_first_bad=lambda found, *_: hits.append(found)) as detector:
        compiled = torch.compile(net, backend=backend, fullgraph=True)
        for index, batch in enumerate(batches(4)):
            engine.backward(compiled(batch * (index < 2)).pow(2).mean())
            engine.step()
    assert [(h.step, h.phase, h.module, h.kind) for h in hits] == [(2, "forward", "layers.1", "inf")]
    assert (detector.problems, detector.warnings) == ([], [])


def test_a_plain_module_with_an_optimizer_has_its_steps() -> None:
    net = Stack(Block(), Block(Fails(5)))
    optimizer = torch.optim.AdamW(net.parameters())
    other = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    hits: list[FirstBad] = []
    with attach(net, mode="sentinel", on_first_bad=lambda found, *_: hits.append(found)) as detector:
        for index, batch in enumerate(batches(8)):
            net(batch).pow(2).mean().backward()
            other.step()
            if index % 2:
                optimizer.step()
                optimizer.zero_grad()
    assert [(h.step, h.micro_step, h.module) for h in hits] == [(2, 1, "layers.1")]
    assert detector.problems == []


def test_an_optimizer_that_runs_forward_and_backward_itself() -> None:
    """As Lightning's do. The batch is judged at the end of its backward: then the weights are still good."""
    net = Stack(Block())
    optimizer = torch.optim.AdamW(net.parameters())
    data = batches(4)
    data[2][0, 0] = NAN
    hits: list[FirstBad] = []
    with attach(net, on_first_bad=lambda found, *_: hits.append(found)) as detector:
        for batch in data:

            def closure(batch: Tensor = batch) -> Tensor:
                optimizer.zero_grad()
                loss = net(batch).pow(2).mean()
                loss.backward()
                return loss

            optimizer.step(closure)
    assert [(h.step, h.phase, h.cause) for h in hits] == [(2, "input", "bad-input")]
    assert detector.problems == []


def test_steps_that_change_nothing_are_noticed(capfd: pytest.CaptureFixture[str]) -> None:
    engine = TinyEngine(Stack(Block(Singular())))
    with attach(engine, mode="sentinel", on_first_bad=lambda *_: None) as detector:
        for batch in batches(40):
            engine.backward(engine(batch).sum())
            engine.step()
    # the three weights of 64 and one bias
    assert detector.warnings == [
        "40 of the last 40 steps changed no weight (200 were compared): the engine skipped 40 of them for gradients "
        "that are not finite (loss scale 1)"
    ]
    assert "changed no weight" in capfd.readouterr().err


def test_a_learning_rate_of_zero_is_named() -> None:
    net = Stack(Block())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    with attach(net, mode="sentinel") as detector:
        for batch in batches(40):
            net(batch).sum().backward()
            optimizer.step()
    assert [text.rpartition(": ")[2] for text in detector.warnings] == ["the learning rate is 0"]


def test_an_engine_that_does_not_say_before_where_accumulation_ends() -> None:
    class Unmanaged(TinyEngine):
        """Its step is the boundary, as that of DeepSpeed with `managed_gradient_accumulation` false."""

        running = False

        def is_gradient_accumulation_boundary(self) -> bool:
            return self.running

        def step(self) -> None:
            self.running = True
            super().step()
            self.running = False

    found = hit(Unmanaged(Stack(Block(), Block(Fails(2)))), batches(4), mode="sentinel")
    assert found is not None
    assert (found.step, found.micro_step, found.module) == (2, 0, "layers.1")
