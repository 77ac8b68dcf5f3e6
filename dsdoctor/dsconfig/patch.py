"""RFC 7386 merge patches of a ds_config: apply one, and find the one that leads from a config to another.

A patch is a JSON object; null deletes a key, an object goes deeper, everything else (lists too) replaces.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any


def apply(config: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """A patched copy of `config`; neither argument is changed (RFC 7386, section 2)."""
    result = {key: copy.deepcopy(value) for key, value in config.items()}
    for key, change in patch.items():
        if change is None:
            result.pop(key, None)
        elif isinstance(change, Mapping):
            old = result.get(key)
            result[key] = apply(old if isinstance(old, Mapping) else {}, change)
        else:
            result[key] = copy.deepcopy(change)
    return result


def diff(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """The smallest patch with `apply(old, patch) == new`.

    A merge patch cannot set a value to null; such a key is left out of it, which DeepSpeed reads alike for the keys
    whose default is null.
    """
    patch: dict[str, Any] = {key: None for key in old if key not in new or new[key] is None}
    for key, value in new.items():
        before = old.get(key)
        if value is None or (key in old and _same(before, value)):
            continue
        if isinstance(value, Mapping):
            patch[key] = diff(before, value) if isinstance(before, Mapping) else diff({}, value)
        else:
            patch[key] = copy.deepcopy(value)
    return patch


def combine(*patches: Mapping[str, Any]) -> dict[str, Any]:
    """One patch that does what the given ones do in turn; nulls are kept."""
    result: dict[str, Any] = {}
    for patch in patches:
        for key, change in patch.items():
            old = result.get(key)
            if isinstance(change, Mapping) and isinstance(old, Mapping):
                result[key] = combine(old, change)
            else:
                result[key] = copy.deepcopy(change)
    return result


def _same(left: Any, right: Any) -> bool:
    """Equal as JSON: true is not 1."""
    return bool(left == right) and isinstance(left, bool) == isinstance(right, bool)
