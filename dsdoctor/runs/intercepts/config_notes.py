"""What became of the script's own ds_config, told in notes: the given one wins, "auto" is what the framework says."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dsdoctor.runs import run_config
from dsdoctor.runs.engine_facts import Framework
from dsdoctor.runs.session import RankSession

_KEYS_TOLD = 8
_NAMES: dict[Framework, str] = {"transformers": "Transformers", "accelerate": "Accelerate", "lightning": "Lightning"}


def say_differences(session: RankSession, passed: Any) -> None:
    """Name the keys in which the config that the script passes (a dict or a path) differs from the one in force."""
    theirs = passed if isinstance(passed, dict) else _parsed(passed)
    differing = () if theirs is None else run_config.differences(session.spec.config, theirs)
    if differing:
        session.note(f"the script's own config differs from the given one, which is used, in: {_some(differing)}")


def say_filled_in(session: RankSession, config: Mapping[str, Any], framework: Framework) -> None:
    """Name the values that a framework put into our config, "auto" ones above all."""
    before = session.as_handed_out(config)
    filled = [f"{key} = {_value(config, key)}" for key in run_config.differences(before, config)]
    if filled:
        session.note(f"{_NAMES.get(framework, framework)} filled in: {_some(filled)}")


def _some(items: list[str] | tuple[str, ...]) -> str:
    return ", ".join(items[:_KEYS_TOLD]) + (", ..." if len(items) > _KEYS_TOLD else "")


def _value(config: Mapping[str, Any], dotted: str) -> str:
    node: Any = config
    for part in dotted.split("."):
        node = node.get(part) if isinstance(node, Mapping) else None
    return json.dumps(node, default=str)


def _parsed(path: Any) -> dict[str, Any] | None:
    """A config file as a dict, None where it is not plain JSON."""
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, TypeError, ValueError):
        return None
    return values if isinstance(values, dict) else None
