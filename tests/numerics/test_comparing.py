"""Where two runs part: by hand-made numbers, and on real small models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dsdoctor.cli.main import main
from dsdoctor.numerics import attach
from dsdoctor.numerics.comparing import Comparison, batch, compare, place
from dsdoctor.numerics.numbers import Number, files_in, read
from dsdoctor.report.comparison import lines


def number(**changed: Any) -> Number:
    usual = {
        "batch": 0, "step": 0, "micro_step": 0, "phase": "forward", "module": "a", "tensor": "output",
        "dtype": "float32", "count": 100, "low": 0.1, "high": 2.0, "norm": 10.0, "digest": 1,
    }  # fmt: skip
    return Number(**{**usual, **changed})


def one_pair(a: Number, b: Number) -> Comparison:
    return compare({0: [a]}, {0: [b]})


def test_the_same_bits_part_nowhere() -> None:
    found = one_pair(number(), number())
    assert (found.compared, found.steps, found.ranks) == (1, 1, (0,))
    assert (found.bits, found.rounding, found.factor) == (None, None, None)


@pytest.mark.parametrize(
    ("dtype", "off", "explained"),
    [("float32", 5e-7, True), ("float32", 2e-6, False), ("bfloat16", 0.05, True), ("bfloat16", 0.08, False)],
)
def test_what_rounding_explains_is_counted_in_eps_of_the_coarser_type(dtype: str, off: float, explained: bool) -> None:
    found = one_pair(number(), number(dtype=dtype, norm=10 * (1 + off), digest=2))
    assert found.bits is not None
    assert (found.rounding is None) == explained
    assert found.factor is None


def test_an_input_and_a_first_weight_are_only_cast() -> None:
    for phase in ("input", "parameter"):
        pair = number(phase=phase, dtype="bfloat16"), number(phase=phase, dtype="bfloat16", norm=10.3, digest=2)
        assert one_pair(*pair).rounding is not None


def test_integers_are_not_rounded() -> None:
    ids = number(phase="input", dtype="int64", norm=None)
    assert one_pair(ids, number(phase="input", dtype="int64", norm=None, digest=2)).rounding is not None


def test_a_gradient_that_is_noise_beside_the_others_is_no_difference() -> None:
    """The gradient of a bias that cannot change the loss is the rounding of what cancels."""
    large = number(phase="backward", module="b", tensor="weight.grad")
    noise = number(phase="backward", tensor="bias.grad", norm=3e-7, high=3e-8)
    others = [large, number(phase="backward", tensor="bias.grad", norm=9e-7, high=9e-8, digest=2)]
    found = compare({0: [large, noise]}, {0: others})
    assert found.bits is not None
    assert (found.rounding, found.factor) == (None, None)
    assert one_pair(noise, others[1]).rounding is not None, "alone it is all there is"


@pytest.mark.parametrize("high", [float("inf"), float("nan")])
def test_not_finite_on_one_side_is_beyond_everything(high: float) -> None:
    found = one_pair(number(), number(high=high, norm=None, digest=2))
    assert found.rounding is not None
    assert found.factor is not None
    same = one_pair(number(high=high, norm=None), number(high=high, norm=None, digest=2))
    assert (same.rounding, same.factor) == (None, None)


def test_the_earliest_of_all_ranks_is_told() -> None:
    good = [number(step=step) for step in range(3)]
    late, early = [*good[:2], number(step=2, digest=2)], [good[0], number(step=1, digest=2), good[2]]
    found = compare({0: good, 1: good, 2: good}, {0: late, 1: early})
    assert found.bits is not None
    assert (found.bits.pair.rank, found.bits.pair.a.step, found.ranks) == (1, 1, (0, 1))


def test_calls_of_the_same_module_are_told_apart_and_what_has_no_partner_is_counted() -> None:
    end = number(module="end")
    a = [number(), number(digest=7), number(module="gone"), end]
    found = compare({0: a}, {0: [number(), number(digest=8), number(module="new"), end, number(step=1)]})
    assert found.bits is not None
    assert found.bits.pair.a.digest == 7
    assert (found.only_a, found.only_b) == ((1, "forward of gone: output"), (1, "forward of new: output"))


def test_a_drift_is_told_from_a_jump() -> None:
    def run(*norms: float) -> list[Number]:
        return [number(step=step, norm=norm, digest=round(norm * 1e9)) for step, norm in enumerate(norms)]

    still = run(10, 10, 10, 10)
    jump = compare({0: still}, {0: run(10, 10, 10, 11)}).rounding
    fast = compare({0: still}, {0: run(10.000004, 10.000006, 10.000008, 10.00004)}).rounding
    slow = compare({0: still}, {0: run(10.000004, 10.000009, 10.000014, 10.000025)}).rounding
    found = [parting and (parting.pair.a.step, parting.drifted) for parting in (jump, fast, slow)]
    assert found == [(3, False), (3, False), (3, True)]


def test_every_step_rounds_anew() -> None:
    pair = number(step=15), number(step=15, norm=10.00003, digest=2)
    assert one_pair(*pair).rounding is None
    assert one_pair(number(), number(norm=10.00003, digest=2)).rounding is not None


def test_a_batch_is_compared_without_its_weights() -> None:
    values = [number(batch=3, step=1, micro_step=1), number(batch=3, step=1, phase="parameter"), number(batch=4)]
    assert batch(values, 3) == (number(batch=3),)


# ---------------------------------------------------------------------- real runs


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(4)
        )
        self.head = nn.Linear(32, 50)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        out: Tensor = self.head(hidden)
        return out


def trained(
    folder: Path, *, data: int = 1, dtype: torch.dtype = torch.float32, changed: str = "", steps: int = 4
) -> Path:
    """Train on random tokens from seed `data`; the numbers go into `folder`, `changed` is a weight made 1 % larger."""
    torch.manual_seed(0)
    net = Blocks()
    if changed:
        net.get_parameter(changed).data.mul_(1.01)
    net.to(dtype)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    torch.manual_seed(data)
    with attach(net, mode="sentinel", record=str(folder)) as detector:
        for _ in range(steps):
            ids = torch.randint(0, 50, (4, 16))
            nn.functional.cross_entropy(net(ids).float().flatten(0, 1), ids.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert detector.problems == []
    return folder


def compared(a: Path, b: Path) -> Comparison:
    one, other = ({rank: read(path).values for rank, path in files_in(folder).items()} for folder in (a, b))
    assert one[0]
    return compare(one, other)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("reference"))


def test_the_same_run_twice_parts_nowhere(reference: Path, tmp_path: Path) -> None:
    found = compared(reference, trained(tmp_path))
    assert (found.bits, found.steps, found.only_a, found.only_b) == (None, 4, (0, ""), (0, ""))


def test_other_data_parts_at_the_first_batch(reference: Path, tmp_path: Path) -> None:
    found = compared(reference, trained(tmp_path, data=2))
    for parting in (found.bits, found.rounding):
        assert parting is not None
        assert (parting.pair.a.step, parting.pair.a.phase) == (0, "input")


@pytest.mark.parametrize("changed", ["blocks.2.1.weight", "head.weight"])
def test_another_weight_parts_there(reference: Path, tmp_path: Path, changed: str) -> None:
    found = compared(reference, trained(tmp_path, changed=changed))
    for parting in (found.bits, found.rounding):
        assert parting is not None
        number = parting.pair.a
        assert (number.step, number.phase) == (0, "parameter")
        assert f"{number.module}.{number.tensor}" == changed
        assert parting.pair.ratio == pytest.approx(1.01)
    assert found.factor is None


def test_bf16_stays_within_rounding_of_fp32(reference: Path, tmp_path: Path) -> None:
    found = compared(reference, trained(tmp_path, dtype=torch.bfloat16))
    assert found.bits is not None
    assert found.bits.pair.a.phase == "parameter"
    assert found.rounding is None


def test_another_learning_rate_parts_in_the_weights_of_the_second_step(reference: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = Blocks()
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    torch.manual_seed(1)
    with attach(net, mode="sentinel", record=str(tmp_path)):
        for _ in range(2):
            ids = torch.randint(0, 50, (4, 16))
            nn.functional.cross_entropy(net(ids).float().flatten(0, 1), ids.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
    found = compared(reference, tmp_path)
    assert found.rounding is not None
    assert (found.rounding.pair.a.step, found.rounding.pair.a.phase) == (1, "parameter")


# ---------------------------------------------------------------------- the command


def told(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = main(["nan", "compare", *words])
    written = capsys.readouterr()
    return code, written.out or written.err


def test_the_command_prints_the_place_with_its_numbers(
    reference: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = str(trained(tmp_path, changed="blocks.2.1.weight", steps=1))
    code, text = told(capsys, str(reference), other)
    assert code == 0
    assert "first difference that rounding does not explain: the same place" in text
    assert "first different bits: step 0, micro-step 0, rank 0, weight of blocks.2.1: weight" in text
    code, text = told(capsys, str(reference), other, "--json")
    document = json.loads(text)
    assert (code, document["command"], document["exit_code"], document["findings"]) == (0, "nan", 0, [])
    parting = document["comparison"]["rounding"]
    assert (parting["module"], parting["tensor"], parting["phase"]) == ("blocks.2.1", "weight", "parameter")
    assert parting["b"]["abs_max"] == pytest.approx(1.01 * parting["a"]["abs_max"])


def test_two_batches_of_a_run(reference: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = told(capsys, str(reference), "--batches", "0,3")
    assert code == 0
    assert "first different bits: rank 0, input of the model: input[0]" in text
    assert "tensors of a batch on rank 0" in text


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["REFERENCE", "--batches", "0,9"], "there is no batch 9"),
        (["REFERENCE"], "takes two runs"),
        (["REFERENCE", "nowhere"], "no numbers of a run in nowhere"),
        (["REFERENCE", "BROKEN"], "holds no numbers"),
    ],
)
def test_what_cannot_be_compared_is_said(
    reference: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], why: str
) -> None:
    (tmp_path / "numbers-rank0.jsonl").write_text("[1, 2]\n")
    places = {"REFERENCE": str(reference), "BROKEN": str(tmp_path)}
    code, text = told(capsys, *(places.get(word, word) for word in words))
    assert code == 2
    assert why in text


def test_a_file_that_ends_in_the_middle_is_read_to_there(reference: Path, tmp_path: Path) -> None:
    whole = next(iter(files_in(reference).values())).read_text()
    (tmp_path / "numbers-rank0.jsonl").write_text(whole[: len(whole) // 2])
    numbers = read(tmp_path / "numbers-rank0.jsonl")
    assert not numbers.whole
    found = compared(reference, tmp_path)
    assert 0 < found.compared == len(numbers.values)
    assert found.bits is None
    assert found.only_a == (0, "")


def test_a_place_in_words() -> None:
    assert place(number(module="", phase="input", tensor="input[ids]")) == "input of the model: input[ids]"


def test_other_shapes_and_types_are_told(reference: Path) -> None:
    text = "\n".join(lines(one_pair(number(), number(count=50, dtype="float16")), ("a", "b")))
    assert "A has 100 elements, B 50" in text
    assert "A is float32, B float16" in text
