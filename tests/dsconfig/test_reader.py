"""The position-keeping reader against the hjson library, which is what DeepSpeed parses with."""

import json

import hjson
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dsdoctor.dsconfig.reader import HjsonError, read

names = st.text(st.characters(codec="utf-8", exclude_characters=".\x7f", exclude_categories=("Cc", "Cs")), max_size=8)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | names
trees = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=4))
objects = st.dictionaries(names, trees, max_size=5)


@given(objects, st.sampled_from([None, 1, 4]))
def test_reads_what_json_wrote(value, indent):
    text = json.dumps(value, indent=indent)
    assert read(text).value == hjson.loads(text, object_pairs_hook=dict)


@given(objects)
def test_reads_what_hjson_wrote(value):
    text = hjson.dumps(value)
    try:
        expected = hjson.loads(text, object_pairs_hook=dict)
    except hjson.HjsonDecodeError:
        assume(False)  # hjson writes some texts with a backslash that it cannot read back
    assert read(text).value == expected


@given(st.text(alphabet='{}[],:"\n #/*ab1-.e\\', max_size=40))
def test_agrees_with_hjson_on_any_text(text):
    text = "{\n" + text
    try:
        expected = hjson.loads(text, object_pairs_hook=dict)
    except Exception:
        with pytest.raises(HjsonError):
            read(text)
    else:
        assume("'''" not in text)
        assert read(text).value == expected


LOOSE = """{
  // written by hand
  stage: 2,            # no quotes
  "buckets": [5e8, 1.5,],
  name: plain words, with a comma
  nested: {a: true, b: 1}
}
"""


def test_positions_count_from_the_key():
    reading = read(LOOSE)
    lines = LOOSE.split("\n")
    assert reading.value == hjson.loads(LOOSE, object_pairs_hook=dict)
    for key, line, column in (("stage", 3, 3), ("buckets", 4, 3), ("name", 5, 3)):
        before = LOOSE[: reading.offsets[key]]
        assert (before.count("\n") + 1, len(before) - before.rfind("\n")) == (line, column)
        assert key in lines[line - 1][column - 1 :]


def test_a_value_without_quotes_is_remembered():
    assert set(read("{\n a: True,\n b: AdamW\n c: true\n d: 'x'\n}").quoteless) == {"a", "b"}


def test_duplicates_at_any_depth():
    reading = read('{"a": {"b": 1,\n "b": 2}, "c": 1, "c": 2, "c": 3}')
    assert {key: len(offsets) for key, offsets in reading.duplicates.items()} == {"a.b": 2, "c": 3}
    assert reading.value == {"a": {"b": 2}, "c": 3}


@pytest.mark.parametrize(
    ("text", "offset", "words"),
    [
        ('{"a" 1}', 5, "':' expected"),
        ('{"a": "x', 6, "never closed"),
        ('{"a": ,}', 6, "where a value is expected"),
        ('{"a": 1,, "b": 2}', 8, "where a key is expected"),
        ('{"a": True}', 6, "has no quotes"),
        ("{/* no end", 1, "comment is never closed"),
        ('{"a": 1} trailing', 9, "goes on"),
        ('{"a": ' + "9" * 5000 + "}", 6, "number too large"),
        ("[" * 100_000, None, "nested too deeply"),
    ],
)
def test_mistakes_are_placed(text, offset, words):
    with pytest.raises(HjsonError) as caught:
        read(text)
    assert words in caught.value.message
    assert offset is None or caught.value.offset == offset
