"""Numbers in many lines of one kind, found and compared without making numbers of them."""

import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsdoctor.logs.block import Block
from dsdoctor.logs.columns import Lines
from dsdoctor.logs.fields import locate
from dsdoctor.logs.shapes import keys


def lines_of(texts, *, integers=False):
    """The lines `[3]: text, 5` with these texts, and the field in which these stand."""
    data = "".join(f"[{at % 10 + 3}]: {text}, 5\n" for at, text in enumerate(texts)).encode()
    assert len(set(keys(data, by_lines=True))) == 2, "a key of their own, and the empty one behind the end"
    block = Block(data, lambda found, text: np.ones(len(found), np.int64))
    first = block.text(0)
    (field,) = locate(first, [re.search(rb": (.*),", first).span(1)], [integers])
    return Lines(block, np.arange(len(texts))), field


def extremes(texts, widens=lambda value: True):
    lines, field = lines_of(texts)
    return lines.column(field).beyond(widens)


def expected(texts):
    values = [float(text) for text in texts]
    return {values.index(min(values)), values.index(max(values))}


@given(st.lists(st.floats(0, 1e6, allow_nan=False).filter(lambda v: "e" not in repr(v)), min_size=1, max_size=30))
def test_the_extremes_of_decimals(values):
    assert set(extremes(list(map(repr, values)))) == expected(list(map(repr, values)))


@given(st.lists(st.tuples(st.integers(0, 10**7 - 1), st.integers(0, 10**18)), min_size=1, max_size=30))
def test_the_extremes_of_numbers_of_any_length(pairs):
    texts = [f"{before}.{after}" for before, after in pairs]
    found = extremes(texts)
    assert {float(texts[at]) for at in found} == {float(texts[at]) for at in expected(texts)}


@pytest.mark.parametrize(
    "texts",
    [
        ["1.5e-05", "2.25e-05", "9.5e-06", "3.5e-05"],
        ["4.999987681694999e-05", "4.9999753633899976e-05", "4.9999630450849966e-05"],
        ["123456789.5", "99999999.5", "1.5"],
        ["12345678", "999999999", "3"],
        ["-1.5", "-2.25", "-0.5"],
        ["0.12345678901", "0.12345678902", "0.123456789", "0.12345678902"],
        ["7.5"],
    ],
)
def test_the_extremes_of_numbers_of_any_form(texts):
    """Where the forms differ, others may be named with them."""
    assert set(extremes(texts)) >= expected(texts)


def test_only_what_widens_the_range_is_named():
    assert extremes(["1.5", "2.5", "3.5"], lambda value: value > 3) == [2]


def test_numbers_that_are_not_finite():
    lines, field = lines_of(["nan"] * 3)
    assert lines.column(field).non_finite() == [0, 1, 2]
    assert lines.column(field).beyond(math.isfinite) == []


@given(st.lists(st.integers(0, 10**8 - 1), min_size=1, max_size=30))
def test_integers(values):
    lines, field = lines_of(list(map(str, values)), integers=True)
    assert lines.integers(field).tolist() == values


def test_integers_found_by_what_comes_after_them():
    values = [7, 12345678, 0, 42]
    data = "".join(f"{value}: 5\n" for value in values).encode()
    block = Block(data, lambda found, text: np.ones(len(found), np.int64))
    (field,) = locate(b"7: 5", [(0, 1)], [True])
    assert field.left is None
    assert Lines(block, np.arange(4)).integers(field).tolist() == values


def test_a_line_without_an_integer():
    lines, field = lines_of(["nan", "nan"], integers=True)
    with pytest.raises(ValueError, match="without a number"):
        lines.integers(field)
