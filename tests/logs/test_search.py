"""Many texts looked for at once: the same whether the engine is there or not."""

import random

import pytest

from dsdoctor.logs.search import Search

TEXTS = [b"Killed", b"Error: ", b"ed", b"H", b"[INFO] [", b"never there"]


@pytest.mark.parametrize("with_engine", [False, True])
@pytest.mark.parametrize("size", [10, 100_000])
def test_what_is_there_is_found(monkeypatch, with_engine, size):
    if with_engine:
        pytest.importorskip("hyperscan")
    else:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    numbers = random.Random(0)
    filling = bytes(numbers.choices(b"abc \n\x00\xff", k=size))
    search = Search(TEXTS)
    assert search.present(filling) == []
    for text in TEXTS:
        expected = [other for other in TEXTS if other in text]
        for data in (text + filling, filling + text, filling + text + filling + text):
            assert search.present(data) == expected
