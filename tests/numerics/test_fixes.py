"""Remedies are tried on the batch that went bad, in the run's own process, and change nothing of the run."""

from __future__ import annotations

import itertools
import math
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dsdoctor.finding import FirstBad
from dsdoctor.numerics import attach
from dsdoctor.numerics.examined import Examined
from dsdoctor.numerics.examiner import Examiner
from tests.numerics.cases import CASES
from tests.numerics.engine import TinyEngine

TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def examined(name: str, folder: Path | None = None) -> tuple[FirstBad, Examined, nn.Module]:
    """The first bad value of a planted fault, what its examination showed, and the model."""
    case = CASES[name]
    model = case.build().to(TYPES[case.precision])
    engine, found = TinyEngine(model, lr=1e-3), []
    examiner = Examiner(engine, folder)
    with attach(engine, mode="frames", on_first_bad=lambda f, *_: found.append((f, examiner.examine(f)))) as detector:
        examiner.follow(detector)
        for step in range(3):
            batch = torch.randn(4, 8)
            if case.spoil is not None:
                case.spoil(1, step, batch, model)
            batch = batch.to(TYPES[case.precision])
            engine.backward(case.loss(engine(batch), batch))
            engine.step()
        assert detector.problems == []
    return (*found[0], model)


def outcomes(known: Examined) -> dict[str, str]:
    return {trial.remedy: trial.outcome for trial in known.trials}


def test_an_overflow_of_fp16_is_cured_by_bf16_and_by_an_island() -> None:
    found, known, _ = examined("overflow")
    assert (known.again, known.in_fp32) == ("not-finite", "finite")
    assert outcomes(known) == {"bf16": "finite", "fp32-island": "finite"}
    assert known.cure is not None
    # the norm behind the product takes the large values too, and makes small ones of them
    assert 'keep_in_fp32(model, "part.0", back_to=None)' in known.cure.patch
    assert 'keep_in_fp32(model, "part.1", back_to="float16")' in known.cure.patch
    assert found.dtype == "float16"


@pytest.mark.parametrize(
    ("name", "remedy"),
    [("domain", "eps"), ("backward-singularity", "eps"), ("masked-row", "mask"), ("bad-input", "skip-sample")],
)
def test_what_is_not_finite_in_fp32_either_is_cured_in_the_script(name: str, remedy: str) -> None:
    _, known, _ = examined(name)
    assert (known.again, known.in_fp32) == ("not-finite", "not-finite")
    assert outcomes(known)[remedy] == "finite"


def test_an_eps_that_fp16_loses_is_cured_by_a_larger_one_and_by_a_wider_type() -> None:
    found, known, _ = examined("lost-eps")
    assert "1e-08 is 0 in float16 (aten.add)" in found.detail
    assert known.in_fp32 == "finite"
    assert outcomes(known) == {"bf16": "finite", "fp32-island": "finite", "eps": "finite"}


def test_the_operation_without_a_derivative_is_named() -> None:
    found, known, _ = examined("backward-singularity")
    assert found.op is None, "nothing in forward is wrong"
    assert known.derivative is not None
    op, line = known.derivative
    assert op == "aten.sqrt"
    assert line is not None
    assert "torch.sqrt((x * 0).pow(2))" in line


def test_a_cast_is_cured_by_a_clamp() -> None:
    _, known, _ = examined("cast-overflow")
    assert outcomes(known)["clamp"] == "finite"


def test_the_bad_sample_is_named() -> None:
    _, known, _ = examined("bad-input")
    assert known.samples == (0,), "the case spoils sample 0"


def test_a_printed_patch_is_the_text_that_was_run() -> None:
    torch.manual_seed(0)
    _, known, _ = examined("domain")
    model = CASES["domain"].build().to(torch.bfloat16)
    batch = torch.randn(4, 8).bfloat16()
    assert not bool(model(batch).isfinite().all())
    assert known.cure is not None
    exec(known.cure.patch, {"model": model})
    assert bool(model(batch).isfinite().all())


@pytest.mark.parametrize("name", ["overflow", "domain", "masked-row", "cast-overflow"])
def test_a_patch_can_be_pasted_into_a_function_that_uses_torch(name: str) -> None:
    _, known, _ = examined(name)
    assert known.cure is not None
    source = "def build(model):\n    torch.zeros(1)\n" + textwrap.indent(known.cure.patch, "    ")
    names: dict[str, Any] = {"torch": torch}
    exec(source, names)
    torch.manual_seed(0)
    model = CASES[name].build().to(TYPES[CASES[name].precision])
    names["build"](model)
    assert bool(model(torch.randn(4, 8).to(TYPES[CASES[name].precision])).isfinite().all())


def demo_run(patch: str = "") -> tuple[list[float], Examined | None]:
    """Twenty steps of the packaged demo's model in fp16 on one rank: the losses, and what was examined."""
    from dsdoctor.demo.train import Sentences, TokenModel, plant_outlier

    torch.manual_seed(1)
    model = TokenModel()
    plant_outlier(model.encoder)
    exec(patch, {"model": model})
    engine = TinyEngine(model.half(), lr=0.05, scale=2.0**12)
    found: list[Examined] = []
    losses: list[float] = []
    examiner = Examiner(engine, None)
    data = torch.utils.data.DataLoader(Sentences(), batch_size=2)
    with attach(engine, mode="frames", on_first_bad=lambda f, *_: found.append(examiner.examine(f))) as detector:
        examiner.follow(detector)
        for tokens, labels in itertools.islice(data, 20):
            loss = engine(tokens, labels)
            losses.append(loss.item())
            if found:
                break
            engine.backward(loss)
            engine.step()
    return losses, found[0] if found else None


def test_the_patch_for_the_demo_makes_the_demo_train() -> None:
    pytest.importorskip("deepspeed")
    losses, known = demo_run()
    assert not math.isfinite(losses[-1])
    assert known is not None
    assert known.cure is not None
    trained, nothing = demo_run(known.cure.patch)
    assert nothing is None
    assert len(trained) == 20
    assert all(map(math.isfinite, trained))
    assert trained[-1] < trained[0]


def test_what_cannot_be_tried_says_so() -> None:
    _, known, _ = examined("corrupted-weights")
    assert outcomes(known) == {"corrupted-weights": "not-tried"}
    assert known.trials[0].told().startswith("not tried: ")


def test_what_came_after_the_backward_is_not_run_again() -> None:
    bad = FirstBad(rank=0, step=0, micro_step=0, phase="reduction", module="", tensor="gradients", kind="inf")
    known = Examiner(nn.Linear(2, 2), None).examine(bad)
    assert (known.again, known.why_not) == ("not-tried", "it was made after the backward of the batch")


def test_a_value_that_does_not_come_back_is_not_cured() -> None:
    _, known, _ = examined("not-reproducible")
    assert known.again == "finite"
    assert known.trials == ()


class Odd(nn.Module):
    """Counts its calls in a buffer and in a list, draws random numbers, and divides by zero in fp16 only."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(1))
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.seen.append(1)
        noise = nn.functional.dropout(x, 0.5)
        return self.inner(noise) / (self.inner.weight[0, 0] * 0)


def test_examining_leaves_no_trace_in_the_run() -> None:
    model = Odd()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    seen: list[Any] = []
    engine = TinyEngine(model, lr=0.0)
    examiner = Examiner(engine, None)

    def hit(found: FirstBad, *_: Any) -> None:
        state = torch.get_rng_state()
        seen.append(examiner.examine(found))
        assert torch.equal(state, torch.get_rng_state())

    with attach(engine, mode="frames", on_first_bad=hit) as detector:
        examiner.follow(detector)
        engine.backward(engine(torch.ones(2, 4)).sum())
    assert len(seen) == 1
    assert (model.count.item(), model.seen) == (1.0, [1])
    assert torch.equal(model.inner.weight, before["inner.weight"])
    assert "forward" not in model.__dict__
    assert [name for name, p in model.named_parameters() if p.grad is not None] == ["inner.weight", "inner.bias"]


class Checkpointed(nn.Module):
    """Runs its inner module again in backward. The product passes fp16's range."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
        self.head = nn.Linear(8, 1)
        nn.init.constant_(self.inner[0].weight, 6e4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.inner, x, use_reentrant=False)).float().mean()


def test_a_forward_that_runs_again_in_backward_stays_on_the_copies() -> None:
    model = Checkpointed().half()
    found: list[Examined] = []
    engine = TinyEngine(model, lr=0.0)
    examiner = Examiner(engine, None)
    with attach(engine, mode="frames", on_first_bad=lambda f, *_: found.append(examiner.examine(f))) as detector:
        examiner.follow(detector)
        engine(torch.ones(2, 8).half())
    assert found, "the loss is nan"
    assert outcomes(found[0]) == {"bf16": "finite", "fp32-island": "finite"}
    assert all(p.grad is None for p in model.parameters())
