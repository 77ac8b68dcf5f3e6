"""Prefixes that are learned from the heads of tracebacks."""

import pytest

from dsdoctor.logs.collected import Collected

HEAD = "Traceback (most recent call last):"


@pytest.mark.parametrize(
    ("head", "line", "left"),
    [
        (f"job-7 | {HEAD}", 'job-12 |   File "a.py", line 1', '  File "a.py", line 1'),
        (f"[x 10:00:01] [rank0]: {HEAD}", "[x 10:00:02] [rank3]: KeyError: 1", "[rank3]: KeyError: 1"),
        (f"\x1b[36m(W pid=1)\x1b[0m {HEAD}", "\x1b[36m(W pid=2)\x1b[0m ValueError", "ValueError"),
        (f"a.b*c: {HEAD}", "aXb*c: text", "aXb*c: text"),
        (f"    {HEAD}", '      File "a.py", line 1', '  File "a.py", line 1'),
    ],
    ids=["numbers differ", "a rank stays", "escapes", "only literally", "indentation"],
)
def test_a_learned_prefix_is_taken_off(head, line, left):
    collected = Collected()
    collected.learn(head)
    collected.without_prefix(head.replace(HEAD, '  File "a.py", line 1'))
    assert collected.without_prefix(line) == left


def test_a_word_before_a_quotation_is_no_prefix():
    collected = Collected()
    collected.learn(f"Sample: {HEAD}")
    assert collected.without_prefix("Sample: ValueError: bad") == "Sample: ValueError: bad"
    assert collected.without_prefix('Sample:   File "a.py", line 1') == 'Sample:   File "a.py", line 1'


@pytest.mark.parametrize("head", [HEAD, f"KeyError                 {HEAD}", f"╭──── {HEAD} ────╮"])
def test_a_head_without_a_prefix_teaches_nothing(head):
    collected = Collected()
    collected.learn(head)
    assert collected.without_prefix(head) == head


def test_the_indentation_is_that_of_the_last_head():
    collected = Collected()
    collected.learn(f"    {HEAD}")
    collected.learn(HEAD)
    assert collected.without_prefix("    main()") == "    main()"
