"""Many texts looked for in many lines: the same whether the engine is there or not."""

import random

import pytest

from dsdoctor.logs.search import Search

TEXTS = [b"Killed", b"Error: ", b"ed", b"H", b"[INFO] [", b"never there", b"z\n"]


@pytest.mark.parametrize("with_engine", [False, True])
@pytest.mark.parametrize("count", [3, 3000])
def test_the_lines_that_hold_one_are_found(monkeypatch, with_engine, count):
    if with_engine:
        pytest.importorskip("hyperscan")
    else:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    numbers = random.Random(0)
    lines = [bytes(numbers.choices(b"abc \x00\xff", k=numbers.randrange(80))) for _ in range(count)]
    search = Search(TEXTS)
    assert search.among(lines) == []
    for at in range(0, count, 7):
        text = numbers.choice(TEXTS[:-1])
        lines[at] = numbers.choice([text + lines[at], lines[at] + text, text, text + b"x" + text])
    lines[1] = b"z z "
    lines[-1] = b"z"
    assert search.among(lines) == sorted({*range(0, count, 7), count - 1})
