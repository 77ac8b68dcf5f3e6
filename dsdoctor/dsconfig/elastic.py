"""Elastic training (DeepSpeed up to 0.19.7): the batch size and the numbers of ranks that its section allows.

The arithmetic is that of `deepspeed.elasticity.compute_elastic_config`: a batch size with many divisors below the given
maximum, and every number of ranks that splits it into one of the given micro batches. Version 0.2 works with whole
nodes.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_MANY_DIVISORS = (
    *(1, 2, 4, 6, 12, 24, 36, 48, 60, 120, 180, 240, 360, 720, 840, 1260, 1680, 2520, 5040, 7560, 10080, 15120, 20160),
    *(25200, 27720, 45360, 50400, 55440, 83160, 110880, 166320, 221760, 277200, 332640, 498960, 554400, 665280, 720720),
)
"""Highly composite numbers: each has more divisors than any smaller one."""
_NEWEST = 0.2
_DEFAULTS = {
    "min_gpus": 1,
    "max_gpus": 10000,
    "model_parallel_size": 1,
    "num_gpus_per_node": 1,
    "min_time": 0,
    "version": _NEWEST,
}
_POSITIVE = ("min_gpus", "max_gpus", "model_parallel_size", "num_gpus_per_node")


class NotElastic(Exception):
    """The section allows nothing; `str()` says why, in one line."""


@dataclass(frozen=True, kw_only=True)
class Elastic:
    """What a section comes to for a number of ranks. `counts` are the numbers of ranks that it allows."""

    train: int
    counts: tuple[int, ...]
    micro: int | None
    """The micro batch that DeepSpeed takes, None where the number of ranks is not one of `counts`."""


def enabled(config: Mapping[str, Any]) -> bool:
    """Whether a config asks for elastic training."""
    section = config.get("elasticity")
    return isinstance(section, Mapping) and section.get("enabled") is True


def plan(section: Mapping[str, Any], ranks: int) -> Elastic:
    """What the section gives for `ranks` data-parallel ranks. Raises NotElastic."""
    values = _checked(section)
    micros, most = section["micro_batch_sizes"], section["max_train_batch_size"]
    larger = bool(section.get("prefer_larger_batch", True))
    if float(values["version"]) == 0.1:
        train, counts = _by_ranks(micros, most, values["min_gpus"], values["max_gpus"], larger)
    else:
        train, counts = _by_nodes(micros, most, ranks, values, larger)
    if ranks not in counts:
        return Elastic(train=train, counts=counts, micro=None)
    fitting = [micro for micro in sorted(set(micros), reverse=True) if train // ranks % micro == 0]
    if not fitting:
        raise NotElastic(f"no micro batch of {micros} divides the {train} samples of a step over {ranks} ranks")
    return Elastic(train=train, counts=counts, micro=fitting[0])


def _checked(section: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of the section with defaults filled in."""
    values = {name: section.get(name, default) for name, default in _DEFAULTS.items()}
    most, micros = section.get("max_train_batch_size"), section.get("micro_batch_sizes")
    if not _is_number(most) or micros is None:
        raise NotElastic("max_train_batch_size and micro_batch_sizes have to be given")
    if not isinstance(micros, list) or not micros or not all(isinstance(m, int) and m > 0 for m in micros):
        raise NotElastic("micro_batch_sizes has to be a list of whole numbers above 0")
    bad = next((name for name in _DEFAULTS if not _is_number(values[name])), None)
    bad = bad or next((name for name in _POSITIVE if values[name] < 1), None)
    if bad is not None:
        raise NotElastic(f"{bad} is {values[bad]}, not a number of at least 1")
    if values["max_gpus"] < values["min_gpus"]:
        raise NotElastic(f"max_gpus {values['max_gpus']} is below min_gpus {values['min_gpus']}")
    if values["min_time"] < 0:
        raise NotElastic(f"min_time is {values['min_time']}, below 0")
    _check_version(values)
    if max(micros) > most:
        raise NotElastic(f"the micro batch {max(micros)} is larger than max_train_batch_size {most}")
    return values


def _check_version(values: Mapping[str, Any]) -> None:
    version, parallel, per_node = (values[n] for n in ("version", "model_parallel_size", "num_gpus_per_node"))
    if version not in (0.1, _NEWEST):
        raise NotElastic(f"version {version} is neither 0.1 nor {_NEWEST}")
    if version == 0.1 and parallel > 1:
        raise NotElastic("version 0.1 knows no model parallelism; use version 0.2")
    if version == _NEWEST and per_node % parallel:
        raise NotElastic(f"model_parallel_size {parallel} does not divide num_gpus_per_node {per_node}")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _by_ranks(
    micros: Sequence[int], most: float, fewest: int, largest: float, larger: bool
) -> tuple[int, tuple[int, ...]]:
    """Version 0.1: the batch size that the most numbers of ranks can share; the larger (or smaller) one of equals."""
    sizes = {_scaled(base, int(most)) for base in (*micros, math.lcm(*micros))}
    shares = {size: _shares(size, micros, fewest, largest) for size in sizes}
    best = max(sizes, key=lambda size: (len(shares[size]), size if larger else -size))
    return best, shares[best]


def _scaled(base: int, most: int) -> int:
    """The base times the largest number with many divisors that stays within `most`; the base itself if it is above."""
    if base >= most:
        return base
    return base * _MANY_DIVISORS[bisect.bisect_right(_MANY_DIVISORS, most // base) - 1]


def _shares(size: int, micros: Sequence[int], fewest: int, largest: float) -> tuple[int, ...]:
    """Numbers of ranks that split a batch into whole micro-steps of one of the micro batches."""
    found: set[int] = set()
    for micro in micros:
        whole, rest = divmod(size, micro)
        if not rest:
            small = [number for number in range(1, math.isqrt(whole) + 1) if whole % number == 0]
            found.update(small, (whole // number for number in small))
    return tuple(sorted(count for count in found if fewest <= count <= largest))


def _by_nodes(
    micros: Sequence[int], most: float, ranks: int, values: Mapping[str, Any], larger: bool
) -> tuple[int, tuple[int, ...]]:
    """Version 0.2: as 0.1 by whole nodes; a number of nodes that is not among them gets a batch size of its own."""
    per_node, parallel = values["num_gpus_per_node"], values["model_parallel_size"]
    per_node_data = per_node // parallel
    share = int(most / per_node_data)
    if max(micros) > share:
        raise NotElastic(f"the micro batch {max(micros)} is larger than one rank's part of max_train_batch_size {most}")
    nodes = int(values["max_gpus"] / per_node) or share // min(micros)
    train, counts = _by_ranks(micros, share, int(values["min_gpus"] / per_node) or 1, nodes, larger)
    if not counts and not (larger and train > min(micros)):  # DeepSpeed goes over a list that is not there
        raise NotElastic(f"no number of nodes from min_gpus to max_gpus shares {train} samples")
    data_counts = tuple(count * per_node_data for count in counts)
    if ranks // parallel in data_counts:
        return train * per_node_data, data_counts
    here = ranks / per_node * per_node_data
    sizes = [math.floor(most / (micro * here)) * micro * here for micro in micros]
    return int(max(sizes) if larger else min(sizes)), (int(here),)
