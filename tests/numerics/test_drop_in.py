"""`DebugUnderflowOverflow` beside the class of Transformers that it replaces: the same text, and none of its faults."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dsdoctor
from dsdoctor.numerics.hooks import Hook, NonFiniteFound
from tests.numerics.test_phases import Net
from tests.numerics.test_rules import Attention, Causal, Singular
from tests.numerics.test_transformers import MODELS

debug_utils = pytest.importorskip("transformers.debug_utils")

NAN, INF = float("nan"), float("inf")
_ROW = re.compile(r"^(.{8} .{8}| +None| +not a tensor) (\S+)$")
_LISTED = re.compile(r"\w+|input\[\d+\]|output(\[\d+\]){0,2}")
"""The labels that the class of Transformers uses."""


def printed(script: Callable[[], Any]) -> str:
    """What the script prints; a ValueError ends it early, as both classes do."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(ValueError):
        script()
    return out.getvalue()


def comparable(text: str, buffers: set[str]) -> list[str]:
    """The lines that both classes print: rows of what only ours lists are left out, as are those that theirs cannot
    read (`not a tensor output` of a ModelOutput)."""
    lines = []
    for line in text.splitlines():
        row = _ROW.match(line)
        if row and (not _LISTED.fullmatch(row[2]) or row[2] in buffers or row[1].strip() == "not a tensor"):
            continue
        lines.append(line)
    return lines


def both(
    build: Callable[[], nn.Module], run: Callable[[nn.Module], Any], **options: Any
) -> tuple[list[str], list[str]]:
    """Comparable lines of theirs and of ours for the same model and batches."""
    texts = []
    for kind in (debug_utils.DebugUnderflowOverflow, dsdoctor.DebugUnderflowOverflow):
        torch.manual_seed(0)
        model = build().train()
        buffers = {name.rpartition(".")[2] for name, _ in model.named_buffers()}

        def script(kind: Any = kind, model: nn.Module = model) -> None:
            kind(model, **options)
            run(model)

        texts.append(comparable(printed(script), buffers))
    return texts[0], texts[1]


def three_batches(model: Any) -> None:
    for seed in range(3):
        torch.manual_seed(seed)
        tokens = torch.randint(2, 64, (2, 8))
        model(input_ids=tokens, labels=tokens).loss.backward()


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "bert", "opt"])
def test_traced_batches_read_as_those_of_transformers(name: str) -> None:
    theirs, ours = both(MODELS[name], three_batches, trace_batch_nums=[0, 2], abort_after_batch_num=2)
    assert len(theirs) > 50
    assert ours == theirs


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_the_report_of_a_hit_reads_as_that_of_transformers(name: str) -> None:
    """Up to the row that holds the NaN: there theirs loses the range."""

    def build() -> nn.Module:
        model = MODELS[name]()
        norms = [module for module in model.modules() if type(module).__name__.endswith("Norm")]
        norms[-1].weight.data[0] = NAN
        return model

    theirs, ours = both(build, three_batches)
    bad = next(index for index, line in enumerate(theirs) if line.startswith("     nan      nan"))
    assert "Detected inf/nan during batch_number=0" in theirs
    assert ours[:bad] == theirs[:bad]
    assert ours[bad].split()[1:] == theirs[bad].split()[1:]
    assert ours[bad].split()[0] != "nan", "the smallest magnitude is still told"


def test_signature_and_error_are_those_of_transformers() -> None:
    net = Net()
    dsdoctor.DebugUnderflowOverflow(net, 5, [9], 1)
    net(torch.ones(1, 8))
    with pytest.raises(ValueError, match=r"aborting after 2 batches due to `abort_after_batch_num=1` arg"):
        net(torch.ones(1, 8))


def run(net: nn.Module, *batches: Any, backward: bool = False, **options: Any) -> tuple[str, bool, Any]:
    """What is printed, whether the run was ended, and the debugger."""
    debug = dsdoctor.DebugUnderflowOverflow(net, **options)
    out, ended = io.StringIO(), False
    with contextlib.redirect_stdout(out):
        try:
            for batch in batches:
                result = net(**batch) if isinstance(batch, dict) else net(batch)
                if backward:
                    result.sum().backward()
        except NonFiniteFound:
            ended = True
    debug.remove()
    assert debug.problems == []
    return out.getvalue(), ended, debug


class Returns(nn.Module):
    """Wraps what a layer returns."""

    def __init__(self, wrap: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.wrap = wrap

    def forward(self, x: Tensor) -> Any:
        return self.wrap(x / 0 * 0)


@pytest.mark.parametrize(
    ("wrap", "label"),
    [
        (lambda x: {"hidden": x}, "output[hidden]"),
        (lambda x: [x], "output[0]"),
        (lambda x: (1, (2, (x,))), "output[1][1][0]"),
    ],
)
def test_a_nan_in_any_container_is_found(wrap: Callable[[Tensor], Any], label: str) -> None:
    text, ended, _ = run(Returns(wrap), torch.ones(2))
    assert ended
    assert f"nan {label}" in text


def test_a_nan_handed_over_by_keyword_is_found() -> None:
    class Inner(nn.Module):
        def forward(self, *, states: Tensor) -> Tensor:
            return torch.zeros(1)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(states=x / 0 * 0)

    text, ended, _ = run(Outer(), torch.ones(2))
    assert ended
    assert "nan input[states]" in text


def test_the_members_of_a_model_output_are_listed() -> None:
    model = MODELS["gpt2"]().train()
    tokens = torch.randint(2, 64, (2, 8))
    text, ended, _ = run(model, {"input_ids": tokens, "labels": tokens}, trace_batch_nums=[0])
    assert not ended
    assert re.search(r"\d output\[loss\]\n", text)
    assert re.search(r"\d output\[logits\]\n", text)


@pytest.mark.parametrize(
    "odd",
    [
        torch.ones(2, dtype=torch.bool),
        torch.ones(0),
        torch.ones(2, device="meta"),
        torch.ones(2).to(torch.float8_e4m3fn),
        torch.ones(2, dtype=torch.complex64),
        torch.ones(2, 2).to_sparse(),
    ],
    ids=["bool", "empty", "meta", "float8", "complex", "sparse"],
)
def test_odd_tensors_do_no_harm(odd: Tensor) -> None:
    class Ignores(nn.Module):
        def forward(self, odd: Tensor) -> Tensor:
            return torch.ones(1)

    text, ended, _ = run(Ignores(), odd, trace_batch_nums=[0])
    assert not ended
    assert "input[0]" in text


def test_a_healthy_mask_is_no_alarm() -> None:
    _, ended, _ = run(Net(Attention(Causal())), torch.randn(4, 8))
    assert not ended


def test_a_nan_that_is_born_in_backward_is_found() -> None:
    text, ended, _ = run(Net(Singular()), torch.randn(4, 8), backward=True)
    assert ended
    assert "middle: input[0].grad has nans" in text


def test_memory_is_bounded_after_a_trace() -> None:
    _, _, debug = run(Net(), *[torch.randn(4, 8)] * 30, trace_batch_nums=[0])
    assert len(debug._frames.last()) == 21


def test_a_nan_in_a_traced_batch_does_not_end_the_next() -> None:
    bad = torch.full((4, 8), NAN)
    text, ended, _ = run(Net(), bad, torch.randn(4, 8), trace_batch_nums=[0])
    assert not ended
    assert "nan output" in text


def test_a_nan_in_the_roots_own_frame_has_the_number_of_its_batch() -> None:
    class Late(nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x / 0 * 0 if self.calls == 2 else x

    text, ended, _ = run(Late(), torch.ones(2), torch.ones(2))
    assert ended
    assert "Detected inf/nan during batch_number=1\n" in text


def test_a_module_with_two_parents_has_one_frame_a_call() -> None:
    class Shares(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Sequential(nn.Linear(8, 8))
            self.two = nn.Sequential(self.one[0])

        def forward(self, x: Tensor) -> Tensor:
            return self.two(self.one(x))

    text, _, _ = run(Shares(), torch.ones(2, 8), trace_batch_nums=[0])
    assert text.count("Linear") == 2
    assert text.count("Sequential") == 2


def test_one_generate_is_one_batch() -> None:
    model = MODELS["gpt2"]().eval()
    debug = dsdoctor.DebugUnderflowOverflow(model)
    for _ in range(2):
        model.generate(torch.tensor([[5, 6]]), max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert debug.batch_number == 1
    model(input_ids=torch.tensor([[5, 6]]))
    assert debug.batch_number == 2


def test_an_inner_model_that_is_called_directly_counts_its_batches() -> None:
    net = Net()
    debug = dsdoctor.DebugUnderflowOverflow(net)
    for _ in range(3):
        net.last(net.first(torch.ones(2, 8)))
    assert debug.batch_number == 2


def test_what_a_module_overwrites_is_listed_as_it_was_handed_over() -> None:
    class InPlace(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.div_(0)

    text, ended, _ = run(InPlace(), torch.ones(2))
    assert ended
    assert "1.00e+00 1.00e+00 input[0]" in text
    assert "inf      inf output" in text


def test_buffers_are_listed() -> None:
    net = nn.Sequential(nn.BatchNorm1d(8)).eval()
    net[0].running_mean[3] = NAN  # type: ignore[index, operator]
    text, ended, _ = run(net, torch.ones(2, 8))
    assert ended
    assert re.search(r"0\.00e\+00 +nan running_mean\n", text)


def test_removing_leaves_no_hook_and_works_twice() -> None:
    net = Net()
    debug = dsdoctor.DebugUnderflowOverflow(net)
    debug.remove()
    debug.remove()
    for module in net.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    assert not any(isinstance(hook, Hook) for p in net.parameters() for hook in (p._backward_hooks or {}).values())


def test_a_module_that_raises_has_a_frame() -> None:
    class Fragile(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyError("broken")

    net = Net(Fragile())
    debug = dsdoctor.DebugUnderflowOverflow(net)
    with pytest.raises(KeyError, match="broken"):
        net(torch.ones(2, 8))
    names = [(frame.name, frame.rows[-1].text().split()) for frame in debug._frames.last()]
    assert names[-2:] == [("middle", ["raised", "output"]), ("", ["raised", "output"])]


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_calls_are_marked_and_are_no_batch(reentrant: bool) -> None:
    class Checkpointed(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.last(checkpoint(self.middle, self.first(x), use_reentrant=reentrant))

    text, _, debug = run(Checkpointed(), *[torch.randn(4, 8)] * 2, backward=True, trace_batch_nums=[0, 1])
    assert debug.batch_number == 1
    assert text.count("middle Tanh (recomputed)\n") == 2
    assert text.count("middle Tanh\n") == 2


def test_a_model_that_is_compiled_later_compiles_in_one_graph() -> None:
    torch._dynamo.reset()
    net = Net()
    debug = dsdoctor.DebugUnderflowOverflow(net)
    torch.compile(net, backend="eager", fullgraph=True)(torch.ones(2, 8)).sum().backward()
    assert debug.problems == []


def test_a_compiled_model_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="runs without the hooks"):
        dsdoctor.DebugUnderflowOverflow(torch.compile(Net(), backend="eager"))


def test_an_overflow_that_a_loss_scale_tries_does_not_end_the_run() -> None:
    """The scaled loss overflows fp16 gradients on purpose: that is how the scale is found."""
    net = Net().half()
    dsdoctor.DebugUnderflowOverflow(net)
    (net(torch.randn(4, 8).half()).sum() * 6e4 * 6e4).backward()
    assert not all(p.grad.isfinite().all() for p in net.parameters() if p.grad is not None)


def test_data_parallel_is_refused() -> None:
    with pytest.raises(TypeError, match="DistributedDataParallel"):
        dsdoctor.DebugUnderflowOverflow(nn.DataParallel(Net()))
