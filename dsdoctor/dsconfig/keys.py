"""Dotted keys of a ds_config: read them, make patches of them, list them, and know which keys depend on which.

The functions work on plain dicts and never change their argument.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dsdoctor.dsconfig import batch

_OFFLOADS = ("zero_optimization.offload_optimizer", "zero_optimization.offload_param")


def get(data: Mapping[str, Any], key: str, default: Any = None) -> Any:
    """The value at a dotted key, `default` where there is none."""
    node: Any = data
    for part in key.split("."):
        if not isinstance(node, Mapping) or part not in node:
            return default
        node = node[part]
    return node


def as_patch(key: str, value: Any) -> dict[str, Any]:
    """The merge patch that sets a dotted key, or deletes it where `value` is None."""
    for part in reversed(key.split(".")):
        value = {part: value}
    return dict(value)


def leaves(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """All dotted keys that hold a value rather than a section, in the order of the config; an empty section counts."""
    for name, value in data.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{path}.")
        else:
            yield path, value


def patched_keys(change: Mapping[str, Any]) -> tuple[str, ...]:
    """The dotted keys that a merge patch touches."""
    return tuple(path for path, _value in leaves(change))


def requires(key: str) -> tuple[str, ...]:
    """The dotted keys that decide whether `key` does anything, nearest first.

    Whoever changes one key at a time (bisection) has to keep these as they are, or to change them together.
    """
    if key in batch.KEYS:
        return tuple(other for other in batch.KEYS if other != key)
    for offload in _OFFLOADS:
        if key.startswith(f"{offload}."):
            switch = () if key == f"{offload}.device" else (f"{offload}.device",)
            return (*switch, "zero_optimization.stage")
    section, _, name = key.partition(".")
    if not name:
        return ()
    if section == "zero_optimization":
        return () if name == "stage" else ("zero_optimization.stage",)
    if section in ("optimizer", "scheduler"):
        return () if name == "type" else (f"{section}.type",)
    return () if name == "enabled" else (f"{section}.enabled",)
