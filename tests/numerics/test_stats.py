"""Magnitudes and classes of tensors, against what Python's own floats say, and the text rows made of them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dsdoctor.numerics import detect_overflow
from dsdoctor.numerics.frames import Frame, FrameLog, Row, batch_text, hit_text
from dsdoctor.numerics.stats import BITS, Range, decoded, looks_like_mask, measure, only_minus_inf
from dsdoctor.numerics.trees import arguments, leaves

INF, NAN = float("inf"), float("nan")
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("values", [[0.5, -3.0, 2.0], [-0.0, 1.0], [-7.0], [0.25, -0.25]])
def test_finite_magnitudes(dtype: torch.dtype, values: list[float]) -> None:
    """All these numbers are exact in every type."""
    magnitudes = [abs(v) for v in values]
    assert measure(torch.tensor(values).to(dtype)) == Range(min(magnitudes), max(magnitudes), None)


@pytest.mark.parametrize("dtype", [d for d in FLOATS if d is not torch.float8_e4m3fn])
@pytest.mark.parametrize(
    ("values", "kind"),
    [([1.0, INF], "inf"), ([-INF, 2.0], "inf"), ([NAN, 2.0], "nan"), ([-NAN], "nan"), ([NAN, -INF, 1.0], "inf+nan")],
)
def test_kinds(dtype: torch.dtype, values: list[float], kind: str) -> None:
    found = measure(torch.tensor(values).to(dtype))
    assert found is not None
    assert found.kind == kind


def test_float8_without_inf_has_nan_only() -> None:
    largest = torch.tensor([448.0]).to(torch.float8_e4m3fn)
    assert measure(largest) == Range(448.0, 448.0, None)
    found = measure(torch.tensor([1.0, NAN]).to(torch.float8_e4m3fn))
    assert found is not None
    assert found.kind == "nan"


def test_the_smallest_magnitude_survives_a_nan() -> None:
    found = measure(torch.tensor([2.0, NAN, 0.5]))
    assert found is not None
    assert found.low == 0.5
    assert math.isnan(found.high)


@pytest.mark.parametrize("shape", [(), (3, 4), (2, 3, 4)])
def test_any_layout_in_memory(shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape)
    for view in (tensor, tensor.mT if tensor.ndim > 1 else tensor, tensor.expand(2, *shape)):
        assert measure(view) == Range(tensor.abs().min().item(), tensor.abs().max().item(), None)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([True]),
        torch.empty(0),
        torch.empty(2, device="meta"),
        torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8),
    ],
    ids=["bool", "empty", "meta", "quantized"],
)
def test_nothing_to_measure(tensor: Tensor) -> None:
    assert measure(tensor) is None
    assert not looks_like_mask(tensor)
    assert not detect_overflow(tensor, "it")


def test_other_kinds_of_tensors() -> None:
    assert measure(torch.tensor([-3, 2])) == Range(2.0, 3.0)
    assert measure(torch.tensor([3 - 4j, 1j])) == Range(0.0, 4.0)
    assert measure(torch.tensor([1j * INF])).kind is not None  # type: ignore[union-attr]
    sparse = torch.sparse_coo_tensor([[0, 1]], [5.0, NAN], (9,))  # type: ignore[arg-type]
    assert measure(sparse).kind == "nan"  # type: ignore[union-attr]
    assert measure(torch.tensor([[0.0, 2.0]]).to_sparse_csr()) == Range(2.0, 2.0)


@pytest.mark.parametrize(
    ("values", "mask", "minus"),
    [
        ([0.0, -INF], True, True),
        ([0.0, torch.finfo(torch.float32).min], True, True),
        ([-INF, -INF], False, True),
        ([0.5, -INF], False, True),
        ([0.0, INF], False, False),
        ([0.0, NAN, -INF], False, False),
    ],
)
def test_masks(values: list[float], mask: bool, minus: bool) -> None:
    tensor = torch.tensor(values)
    assert (looks_like_mask(tensor), only_minus_inf(tensor)) == (mask, minus)


def test_detect_overflow_prints_what_it_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert detect_overflow(torch.tensor([NAN, INF]), "after ffn")
    assert capsys.readouterr().out == "after ffn has nans\nafter ffn has infs\n"
    assert not detect_overflow(torch.ones(3), "after ffn")
    assert capsys.readouterr().out == ""


def test_labels_of_nested_values() -> None:
    found = dict(arguments((1, [2, {"k": 3}]), {"mask": (4,)}))
    assert found == {"input[0]": 1, "input[1][0]": 2, "input[1][1][k]": 3, "input[mask][0]": 4}
    assert dict(leaves(5, "output")) == {"output": 5}


def test_a_container_that_holds_itself_ends() -> None:
    loop: list[object] = []
    loop.append(loop)
    assert len(list(leaves(loop, "output"))) == 1


def test_frames_keep_the_last_and_print_in_the_known_layout() -> None:
    log = FrameLog(2)
    for name in "abc":
        log.add(Frame(name, "Linear", (Row("weight", Range(2.17e-07, 4.5)), Row("bias", None, "None"))))
    assert [frame.name for frame in log.last()] == ["b", "c"]
    assert hit_text(log.last()[1:], 3) == (
        "Detected inf/nan during batch_number=3\n"
        "Last 1 forward frames:\n"
        "abs min  abs max  metadata\n"
        "                  c Linear\n"
        "2.17e-07 4.50e+00 weight\n"
        "             None bias"
    )
    assert "*** Finished batch number=4 ***" in batch_text(log.last(), 4)


def test_rows_match_the_transformers_class() -> None:
    debug_utils = pytest.importorskip("transformers.debug_utils")
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for scale in (1e-6, 1.0, 1e4):
            tensor = (torch.randn(50) * scale).to(dtype)
            assert Row("weight", measure(tensor)).text() == debug_utils.get_abs_min_max(tensor, "weight")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_every_pattern_is_decoded_as_torch_reads_it(dtype: torch.dtype) -> None:
    bits = BITS[dtype]
    patterns = torch.arange(bits.magnitude + 1).to(bits.integer)
    expected = patterns.view(dtype).double().tolist()
    found = [decoded(pattern, dtype) for pattern in patterns.tolist()]
    assert [str(value) for value in found] == [str(value) for value in expected]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wide_patterns_are_decoded_as_torch_reads_them(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    values = torch.cat([torch.randn(100, dtype=dtype).abs() ** k for k in (1, 30, -30)] + [torch.tensor([0.0, INF])])
    patterns = values.to(dtype).view(BITS[dtype].integer).tolist()
    assert [decoded(pattern, dtype) for pattern in patterns] == values.to(dtype).double().tolist()
