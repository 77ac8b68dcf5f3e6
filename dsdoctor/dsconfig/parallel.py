"""Over how many ranks DeepSpeed's config spreads the batch, with sequence, tensor and pipeline parallelism.

`DeepSpeedConfig` divides by what a model-parallel unit says; without one by the mesh of `data_parallel_size` and
`sequence_parallel_size`, or by the world less `sequence_parallel_size`. `tensor_parallel.autotp_size` alone divides
nothing: only a script that passes a unit for it does. Expert parallelism leaves the batch as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dsdoctor.dsconfig.release import at_least

_DATA, _SEQUENCE = "data_parallel_size", "sequence_parallel_size"
KEYS = (_DATA, _SEQUENCE, "tensor_parallel.autotp_size")
_SEQUENCE_ALONE_SINCE = "0.17.0"
"""Releases before it take `sequence_parallel_size` into account beside `data_parallel_size` only."""


@dataclass(frozen=True, kw_only=True)
class Grid:
    """`ranks` are the possible numbers of data-parallel ranks, the one without a model-parallel unit first.

    Empty where the sizes do not fit the world; `problem` says why then.
    """

    ranks: tuple[int, ...] = ()
    problem: str | None = None


def grid(config: Mapping[str, Any], world: int, *, release: str = "", stages: int = 1) -> Grid:
    """The data-parallel ranks of a config in a world of `world` ranks, `stages` of them in each pipeline."""
    sequence, tensor = _size(config, _SEQUENCE), _tensor(config)
    if stages > 1:
        return _divided(world, stages, f"{stages} pipeline stages")
    if _DATA in config and _SEQUENCE in config:
        data = _size(config, _DATA)
        if data * sequence != world:
            return Grid(problem=f"{_DATA} {data} x {_SEQUENCE} {sequence} is not the {world} ranks")
        return Grid(ranks=(data,))
    if not release or at_least(release, _SEQUENCE_ALONE_SINCE):
        given = config.get(_SEQUENCE, 1)
        if isinstance(given, (int, float)) and given < 0:
            return Grid(problem=f"{_SEQUENCE} {given} is below 1")
        if sequence > 1:
            return _divided(world, sequence, f"{_SEQUENCE} {sequence}")
    if world % tensor:
        return Grid(problem=f"tensor_parallel.autotp_size {tensor} does not divide the {world} ranks")
    return Grid(ranks=tuple(dict.fromkeys((world, world // tensor))))


def _divided(world: int, by: int, what: str) -> Grid:
    if world % by:
        return Grid(problem=f"{what} {'do' if what.endswith('s') else 'does'} not divide the {world} ranks")
    return Grid(ranks=(world // by,))


def _tensor(config: Mapping[str, Any]) -> int:
    section = config.get("tensor_parallel")
    return _size(section, "autotp_size") if isinstance(section, Mapping) else 1


def _size(section: Mapping[str, Any], name: str) -> int:
    """A size as given; 1 where it is missing, not a whole number, or below 1."""
    value = section.get(name, 1)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 1 else 1
