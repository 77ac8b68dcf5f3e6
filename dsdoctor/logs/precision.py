"""The precision of a job and the settings of its loss scale, out of a config and what other lines show."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def scale_settings(config: Mapping[str, Any] | None, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The fp16 section in force: what the engine dumped, else what the config says."""
    given = (config or {}).get("fp16")
    dumped = {key.removeprefix("fp16."): value for key, value in settings.items() if key.startswith("fp16.")}
    return {**(given if isinstance(given, Mapping) else {}), **dumped}


def precision_of(config: Mapping[str, Any] | None, settings: Mapping[str, Any]) -> str | None:
    """fp16 or bf16 where the config or another line says so, fp32 where the config excludes both, else None."""
    known = config is not None
    for name in ("fp16", "bf16"):
        section = (config or {}).get(name)
        value = section.get("enabled", False) if isinstance(section, Mapping) else False
        value = settings.get(f"{name}.enabled", value)
        if value is True:
            return name
        known = known and value is False
    return "fp32" if known else None
