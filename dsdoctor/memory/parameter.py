"""One parameter of a model, as far as memory goes."""

from __future__ import annotations

from typing import NamedTuple


class Parameter(NamedTuple):
    """`elements` are counted, `loaded` are the bytes of one before DeepSpeed casts it; tied ones are listed once."""

    name: str
    elements: int
    trainable: bool = True
    loaded: float = 4.0
    expert: bool = False

    @property
    def module(self) -> str:
        return self.name.rpartition(".")[0]
