"""The numbers of a run, a line for each tensor in the order in which they came to be, to compare runs. No torch.

A file begins with a line about the rank, an object; every other line is a `Number`, as a list of its fields.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, Literal

Moment = Literal["input", "parameter", "forward", "backward"]
NAME = "numbers"
MOST = 300_000
"""Tensors that are kept of a rank (about 40 MB); what comes later is left out."""


@dataclass(frozen=True, slots=True)
class Number:
    """One tensor at one moment. A gradient is taken before any reduction, with the loss scale divided out.

    `tensor` is its label in `module`, `count` the number of elements. `low` and `high` are magnitudes, `norm` is the
    Euclidean one (None for integers), `digest` depends on every bit.
    """

    batch: int
    step: int
    micro_step: int
    phase: Moment
    module: str
    tensor: str
    dtype: str
    count: int
    low: float
    high: float
    norm: float | None
    digest: int

    def line(self) -> str:
        return json.dumps(astuple(self))


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """What one rank wrote. `whole` is False where it stopped at the limit, or in the middle of a line."""

    about: Mapping[str, Any]
    values: tuple[Number, ...]
    whole: bool = True


def path_of(folder: Path, rank: int) -> Path:
    """Where a rank writes its numbers."""
    return folder / f"{NAME}-rank{rank}.jsonl"


def files_in(folder: Path) -> dict[int, Path]:
    """The files of a run by rank: in this folder, or in that of a run's detector below it."""
    for place in (folder, folder / "numerics"):
        found = {int(path.stem.partition("-rank")[2]): path for path in place.glob(f"{NAME}-rank*.jsonl")}
        if found:
            return found
    return {}


def read(path: Path) -> Numbers:
    """Read a rank's file, up to a line that is not whole. Raises OSError, and ValueError for what is no such file."""
    with open(path, encoding="utf-8") as file:
        about = json.loads(file.readline() or "null")
        if not isinstance(about, dict) or about.get("kind") != NAME:
            raise ValueError(f"{path} holds no numbers of a run")
        whole: list[bool] = []
        values = tuple(_parsed(file, whole))
    return Numbers(about=about, values=values, whole=not whole and len(values) < MOST)


def _parsed(lines: Any, broken: list[bool]) -> Iterator[Number]:
    for line in lines:
        try:
            yield Number(*json.loads(line))
        except (ValueError, TypeError):  # the process was killed while it wrote
            broken.append(True)
            return
