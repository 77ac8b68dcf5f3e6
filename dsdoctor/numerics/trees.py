"""The values inside what a module takes and returns, each with the label that reports use. No torch needed.

Labels follow the well-known report where it has one (`input[0]`, `output`, `output[1][0]`); members of mappings and
dataclasses, which that report lacks, carry their key (`input[mask]`, `output[logits]`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

_DEPTH = 8
_WIDTH = 256
"""How deep and how wide a container is read: enough for any model's outputs, a bound for anything else."""


def leaves(value: Any, label: str, depth: int = _DEPTH) -> Iterator[tuple[str, Any]]:
    """Every leaf of nested tuples, lists, mappings and dataclasses, with its label."""
    members = _members(value) if depth else None
    if members is None:
        yield label, value
        return
    for key, member in members:
        yield from leaves(member, f"{label}[{key}]", depth - 1)


def arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Every leaf of a call's arguments: `input[0]` for the first positional one, `input[name]` for a keyword."""
    yield from leaves(args, "input")
    yield from leaves(dict(kwargs), "input")


def _members(value: Any) -> list[tuple[Any, Any]] | None:
    if isinstance(value, Mapping):
        return list(value.items())[:_WIDTH]
    if isinstance(value, (tuple, list)):
        return list(enumerate(value[:_WIDTH]))
    if is_dataclass(value) and not isinstance(value, type):
        return [(f.name, getattr(value, f.name, None)) for f in fields(value)]
    return None
