"""A bad value that does not come back: what more runs of the batch show, and what is concluded from them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from dsdoctor.numerics import attach
from dsdoctor.numerics.bundle import load
from dsdoctor.numerics.examined import Examined
from dsdoctor.numerics.examiner import Examiner
from dsdoctor.numerics.repeats import Repeats
from dsdoctor.numerics.replaying import run_again
from tests.numerics.cases import Net
from tests.numerics.engine import TinyEngine

NAN = float("nan")


class Part(nn.Module):
    """NaN in the first call that trains; after it whatever `later` makes."""

    def __init__(self, later: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.later = later
        self.calls = iter([True])

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.full_like(x, NAN) if next(self.calls, False) else self.later(x)


def examined(later: Callable[[Tensor], Tensor], folder: Path | None = None) -> Examined:
    model = Net(Part(later))
    engine, found = TinyEngine(model), []
    examiner = Examiner(engine, folder)
    with attach(engine, mode="frames", on_first_bad=lambda bad, *_: found.append(examiner.examine(bad))) as detector:
        examiner.follow(detector)
        engine.backward(engine(torch.randn(4, 8)).pow(2).mean())
        engine.step()
    assert detector.problems == []
    known: Examined = found[0]
    assert Examined.from_dict(json.loads(json.dumps(known.to_dict()))) == known
    return known


def repeated(later: Callable[[Tensor], Tensor]) -> Repeats:
    known = examined(later)
    assert (known.again, known.trials) == ("finite", ())
    assert known.repeats is not None
    return known.repeats


def test_a_state_that_is_not_in_the_batch() -> None:
    seen = repeated(lambda x: x)
    assert (seen.runs, seen.bad, seen.same_bits, seen.reads_unwritten) == (4, 0, True, False)
    assert (seen.fixed_order, seen.one_thread) == (None, None), "nothing varies, so nothing asks for it"
    assert seen.meaning.startswith("the batch alone does not make it: 4 runs are finite and the same to the bit")
    assert "I cannot tell which" in seen.meaning


def test_memory_that_nothing_was_written_to() -> None:
    """torch fills integers with their largest number; eight bytes that are all 255 by chance are not to be expected."""
    seen = repeated(lambda x: x / torch.empty(8, dtype=torch.uint8).ne(255).any())
    assert seen.reads_unwritten
    assert seen.where.startswith("part: output, aten.div, at ")
    assert "memory that nothing was written to" in seen.meaning


def test_work_that_varies_whatever_is_asked_of_torch() -> None:
    count = itertools.count(1)
    seen = repeated(lambda x: x * (1 + 1e-3 * next(count)))
    assert (seen.same_bits, seen.fixed_order, seen.reads_unwritten) == (False, False, False)
    assert "I cannot tell which from here" in seen.meaning
    assert "nan replay" in seen.meaning


def test_a_value_that_comes_and_goes() -> None:
    count = itertools.count(1)
    seen = repeated(lambda x: x * (NAN if next(count) % 3 == 1 else 1))
    assert 0 < seen.bad < seen.runs
    assert not seen.reads_unwritten
    assert f"4 runs of the same work give different bits ({seen.bad} of 4 not finite)" in seen.meaning


def test_operations_that_sum_in_any_order() -> None:
    count = itertools.count(1)

    def unordered(x: Tensor) -> Tensor:
        image = x.reshape(1, 1, 4, 8)
        pooled, places = nn.functional.max_pool2d(image, 2, return_indices=True)
        x = x + nn.functional.max_unpool2d(pooled, places, 2).reshape(4, 8)
        return x if torch.are_deterministic_algorithms_enabled() else x * (1 + 1e-3 * next(count))

    seen = repeated(unordered)
    assert (seen.same_bits, seen.fixed_order) == (False, True)
    assert seen.unordered == ("max_unpooling2d_forward_out",)
    assert "sum in any order (max_unpooling2d_forward_out)" in seen.meaning
    assert "alone makes no value that is not finite" in seen.meaning


def test_what_is_asked_of_torch_is_taken_back() -> None:
    threads = torch.get_num_threads()
    count = itertools.count(1)
    repeated(lambda x: x * (1 + 1e-3 * next(count)))
    assert torch.get_num_threads() == threads
    assert not torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()


def test_threads_that_race() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    count = itertools.count(1)
    try:
        seen = repeated(lambda x: x if torch.get_num_threads() == 1 else x * (1 + 1e-3 * next(count)))
    finally:
        torch.set_num_threads(threads)
    assert seen.one_thread
    assert "the same on one thread: threads race" in seen.meaning


def test_a_value_that_comes_back_is_not_repeated() -> None:
    known = examined(lambda x: torch.log(x * 0))
    assert known.again == "not-finite"
    assert known.repeats is None


def test_a_loss_outside_of_the_model_need_not_come_back() -> None:
    engine, found = TinyEngine(nn.Linear(8, 8)), []
    examiner = Examiner(engine, None)
    with attach(engine, mode="frames", on_first_bad=lambda bad, *_: found.append(examiner.examine(bad))) as detector:
        examiner.follow(detector)
        engine.backward(torch.log(engine(torch.randn(4, 8)).sum() * 0))
    assert (found[0].again, found[0].repeats) == ("finite", None)


def test_a_bundle_is_repeated_as_well(tmp_path: Path) -> None:
    known = examined(lambda x: x, tmp_path)
    model = Net(Part(lambda x: x))
    next(model.part.calls)  # type: ignore[arg-type, union-attr]
    found, _, again = run_again(model, load(Path(known.bundle)))
    assert found.cause == "not-reproducible"
    assert again.repeats is not None
    assert found.detail.endswith(again.repeats.meaning)


@pytest.mark.parametrize("bad", [0, 2])
def test_what_varies_only_out_of_order_is_rounding_unless_it_was_bad(bad: int) -> None:
    meaning = Repeats(runs=4, bad=bad, same_bits=False, fixed_order=True).meaning
    assert ("rounding" in meaning) == (bad == 0)
