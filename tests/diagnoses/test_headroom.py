"""A forecast is a straight line through the octaves, and nothing is forecast from a cloud or from afar."""

import math

import pytest

from dsdoctor.case import Case
from dsdoctor.numerics.headroom import ModulePeaks
from dsdoctor.numerics.underflow import Underflow
from tests.diagnoses.examples import found


def peaks(*values, dtype="float16", module="block.3"):
    return ModulePeaks(module=module, dtype=dtype, peaks=tuple(enumerate(values)))


def doubling(start, count, factor=2.0):
    return [start * factor**step for step in range(count)]


FLUSHED = Underflow(step=7, scale=1.0, share=0.9, worst=(("a.weight", 0.97),), larger=((16.0, 0.6), (256.0, 0.1)))
POSITIVE = {
    "numerics/headroom": [Case(headroom=(peaks(*doubling(1000.0, 6)),))],
    "numerics/gradient-underflow": [Case(underflow=FLUSHED)],
}
NEGATIVE = {
    "numerics/gradient-underflow": [Case(underflow=Underflow(step=7, scale=65536.0, share=0.02))],
    "numerics/headroom": [
        Case(headroom=(peaks(*[1000.0] * 12),)),
        Case(headroom=(peaks(*doubling(1000.0, 6), dtype="bfloat16"),)),
        Case(headroom=(peaks(*doubling(1e-3, 8)),)),
        Case(headroom=(peaks(100, 2000, 90, 3000, 80, 2500, 120, 1900),)),
    ],
}


@pytest.mark.parametrize(("identifier", "case"), [(i, c) for i, cases in POSITIVE.items() for c in cases])
def test_positive(identifier, case):
    assert found(case, identifier)


@pytest.mark.parametrize(("identifier", "case"), [(i, c) for i, cases in NEGATIVE.items() for c in cases])
def test_negative(identifier, case):
    assert not found(case, identifier)


def test_underflow_is_answered_with_the_smallest_scale_that_was_seen_to_help():
    (finding,) = found(Case(underflow=FLUSHED), "numerics/gradient-underflow")
    scale = finding.fixes[0]
    assert scale.patch == {"fp16": {"loss_scale": 0, "initial_scale_power": 8}}, "2**8 is 256 times the scale of 1"
    assert "tried: finite, 10% flushed" in scale.text


def test_the_steps_left_are_octaves_over_octaves_a_step():
    one = peaks(*doubling(1024.0, 6))
    # 1024 * 2**5 = 32768, half of the limit but for the last bit; one octave a step
    assert one.octaves == pytest.approx(math.log2(65504 / 32768))
    assert one.slope == pytest.approx(1.0)
    assert one.steps_left == pytest.approx(1.0, abs=0.01)


def test_values_that_shrink_or_are_few_have_no_crossing():
    assert peaks(*doubling(3e4, 8, 0.5)).steps_left is None
    assert peaks(1.0, 2.0, 4.0).slope is None


def test_what_is_not_finite_or_zero_is_left_out():
    assert peaks(0.0, math.inf, 16.0).finite == ((2, 16.0),)


def test_the_warning_names_module_steps_and_its_doubt():
    (finding,) = found(POSITIVE["numerics/headroom"][0], "numerics/headroom")
    assert "block.3 crosses the limit of float16 in about 1 steps" in finding.cause
    assert finding.caveat
