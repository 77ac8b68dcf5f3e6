"""A forecast is a straight line through the octaves, and nothing is forecast from a cloud or from afar."""

import math

import pytest

from dsdoctor.case import Case
from dsdoctor.numerics.headroom import ModulePeaks
from tests.diagnoses.examples import found


def peaks(*values, dtype="float16", module="block.3"):
    return ModulePeaks(module=module, dtype=dtype, peaks=tuple(enumerate(values)))


def doubling(start, count, factor=2.0):
    return [start * factor**step for step in range(count)]


POSITIVE = {"numerics/headroom": [Case(headroom=(peaks(*doubling(1000.0, 6)),))]}
NEGATIVE = {
    "numerics/headroom": [
        Case(headroom=(peaks(*[1000.0] * 12),)),
        Case(headroom=(peaks(*doubling(1000.0, 6), dtype="bfloat16"),)),
        Case(headroom=(peaks(*doubling(1e-3, 8)),)),
        Case(headroom=(peaks(100, 2000, 90, 3000, 80, 2500, 120, 1900),)),
    ]
}


@pytest.mark.parametrize("case", POSITIVE["numerics/headroom"])
def test_positive(case):
    assert found(case, "numerics/headroom")


@pytest.mark.parametrize("case", NEGATIVE["numerics/headroom"])
def test_negative(case):
    assert not found(case, "numerics/headroom")


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
