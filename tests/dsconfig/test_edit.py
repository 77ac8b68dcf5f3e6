"""Changing a config file in place: the patch is in it afterwards, and everything else is as it was."""

import json
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dsdoctor.dsconfig import patch, reader
from dsdoctor.dsconfig.edit import NotEditable, patched

TEXT = """{
  // written by hand
  "train_batch_size": 8, # eight
  "zero_optimization": {
    "stage": 2,
    "overlap_com": true,   // fast
    "cpu_offload": true
  },
  "fp16": {"enabled": "true", "x": 1},
  "old": 5
}
"""
ZERO = "zero_optimization"


def changed_lines(before, after):
    old, new = before.splitlines(), after.splitlines()
    return [line for line in old if line not in new], [line for line in new if line not in old]


@pytest.mark.parametrize(
    ("change", "gone", "come"),
    [
        (
            {ZERO: {"overlap_com": None, "overlap_comm": True}},
            ['    "overlap_com": true,   // fast'],
            ['    "overlap_comm": true,   // fast'],
        ),
        (
            {ZERO: {"cpu_offload": None, "offload_optimizer": {"device": "cpu"}}},
            ['    "cpu_offload": true'],
            ['    "offload_optimizer": {"device": "cpu"}'],
        ),
        (
            {"old": None},
            ['  "fp16": {"enabled": "true", "x": 1},', '  "old": 5'],
            ['  "fp16": {"enabled": "true", "x": 1}'],
        ),
        (
            {"fp16": {"enabled": True}},
            ['  "fp16": {"enabled": "true", "x": 1},'],
            ['  "fp16": {"enabled": true, "x": 1},'],
        ),
        ({"fp16": {"x": None}}, ['  "fp16": {"enabled": "true", "x": 1},'], ['  "fp16": {"enabled": "true"},']),
        (
            {"fp16": {"y": 2}},
            ['  "fp16": {"enabled": "true", "x": 1},'],
            ['  "fp16": {"enabled": "true", "x": 1, "y": 2},'],
        ),
        ({"new": [1]}, ['  "old": 5'], ['  "old": 5,', '  "new": [1]']),
        (
            {ZERO: {"cpu_offload": None}},
            ['    "overlap_com": true,   // fast', '    "cpu_offload": true'],
            ['    "overlap_com": true   // fast'],
        ),
        ({"train_batch_size": None}, ['  "train_batch_size": 8, # eight'], ["  # eight"]),
    ],
)
def test_only_the_change_is_seen(change, gone, come):
    assert changed_lines(TEXT, patched(TEXT, change)) == (gone, come)


def test_line_ends_and_a_byte_order_mark_stay():
    text = "\ufeff" + TEXT.replace("\n", "\r\n")
    after = patched(text, {"new": 1, ZERO: {"stage": 3}})
    assert after.startswith("\ufeff")
    assert "\n" not in after.replace("\r\n", "")


@pytest.mark.parametrize(
    ("text", "change", "result"),
    [
        (
            "{\n  bf16: {\n    enabled: True,\n  }\n}",
            {"bf16": {"enabled": True}},
            "{\n  bf16: {\n    enabled: true,\n  }\n}",
        ),
        ("a: 1\nb: two words\n", {"c": 3}, 'a: 1\nb: two words\n"c": 3\n'),
        ("{}", {"a": 1}, '{"a": 1}'),
        ('{"a": {}}', {"a": {"b": 1}}, '{"a": {"b": 1}}'),
        ('{"a": 1}', {"a": None}, "{}"),
        ('{\n "a": 1,\n "b": 2,\n}', {"b": None}, '{\n "a": 1,\n}'),
        ('{\n "a": 1,\n}', {"b": 2}, '{\n "a": 1,\n "b": 2,\n}'),
        ("{'a b': 1}", {"a b": None, "c": 1}, '{"c": 1}'),
    ],
)
def test_layouts(text, change, result):
    assert patched(text, change) == result


@pytest.mark.parametrize("text", ['{"a": 1, "a": 2}', '{"a": ', '{"x": {"y": 2}, "x.y": 1}'])
def test_what_cannot_be_changed_is_refused(text):
    with pytest.raises(NotEditable):
        patched(text, {"a": 3, "x": {"y": 3}})


names = st.sampled_from(["a", "b", "c", "deep"])
scalars = (
    st.booleans()
    | st.integers(0, 3)
    | st.sampled_from(["auto", "x, y", "# no comment"])
    | st.lists(st.just(1), max_size=2)
)
objects = st.recursive(
    st.dictionaries(names, scalars, max_size=3), lambda inner: st.dictionaries(names, scalars | inner, max_size=3)
)
changes = st.recursive(
    st.dictionaries(names, scalars | st.none(), max_size=3),
    lambda inner: st.dictionaries(names, scalars | st.none() | inner, max_size=3),
)


def commented(text):
    return re.sub(r"\n", "  // said\n", text)


@given(objects, changes, st.sampled_from([None, 2]), st.booleans())
@example({"a": False, "b": False, "c": False}, {"b": None, "c": None}, None, False)
def test_any_patch_is_what_the_text_then_holds(value, change, indent, comments):
    text = json.dumps(value, indent=indent)
    text = commented(text) if comments else text
    try:
        after = patched(text, change)
    except NotEditable:
        assert comments  # a comment may stand between a key and the comma that has to go
        return
    assert reader.read(after).value == patch.apply(value, change)
