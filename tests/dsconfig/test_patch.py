"""Merge patches against the examples of RFC 7386, appendix A, and their laws."""

import copy

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dsdoctor.dsconfig.patch import apply, combine, diff


@pytest.mark.parametrize(
    ("target", "patch", "result"),
    [
        ({"a": "b"}, {"a": "c"}, {"a": "c"}),
        ({"a": "b"}, {"b": "c"}, {"a": "b", "b": "c"}),
        ({"a": "b"}, {"a": None}, {}),
        ({"a": "b", "b": "c"}, {"a": None}, {"b": "c"}),
        ({"a": ["b"]}, {"a": "c"}, {"a": "c"}),
        ({"a": "c"}, {"a": ["b"]}, {"a": ["b"]}),
        ({"a": {"b": "c"}}, {"a": {"b": "d", "c": None}}, {"a": {"b": "d"}}),
        ({"a": [{"b": "c"}]}, {"a": [1]}, {"a": [1]}),
        ({"e": None}, {"a": 1}, {"e": None, "a": 1}),
        ({}, {"a": {"bb": {"ccc": None}}}, {"a": {"bb": {}}}),
    ],
)
def test_examples_of_the_rfc(target, patch, result):
    before = copy.deepcopy((target, patch))
    assert apply(target, patch) == result
    assert (target, patch) == before


values = st.recursive(
    st.booleans() | st.integers(0, 2) | st.text("ab", max_size=2) | st.lists(st.integers(0, 2), max_size=2),
    lambda inner: st.dictionaries(st.text("xyz", min_size=1, max_size=1), inner, max_size=3),
    max_leaves=8,
)
configs = st.dictionaries(st.text("pqr", min_size=1, max_size=1), values, max_size=3)


@given(configs, configs)
def test_the_diff_leads_from_one_to_the_other(old, new):
    assert repr(sorted_tree(apply(old, diff(old, new)))) == repr(sorted_tree(new))


@given(configs)
def test_no_difference_is_an_empty_patch(config):
    assert diff(config, copy.deepcopy(config)) == {}


@given(configs, configs, configs)
def test_a_combined_patch_does_what_both_do(config, first, second):
    assume(not refills(first, second))
    assert apply(config, combine(first, second)) == apply(apply(config, first), second)


def refills(first, second):
    """An object goes for a value or null, and comes back: no one merge patch can say that it starts empty."""
    both = [(first[key], value) for key, value in second.items() if key in first and isinstance(value, dict)]
    return any(not isinstance(old, dict) or refills(old, value) for old, value in both)


def sorted_tree(value):
    return {key: sorted_tree(value[key]) for key in sorted(value)} if isinstance(value, dict) else value
