"""The JSON document that every command prints with `--json`: the dict edge of the dataclasses."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from typing import Any

import dsdoctor
from dsdoctor.finding import Evidence, Finding, Fix, Verdict

SCHEMA = 1


def document(
    command: str,
    *,
    exit_code: int,
    findings: Sequence[Finding],
    environment: Mapping[str, Any] | None = None,
    stages: Sequence[Mapping[str, Any]] | None = None,
    verdict: Verdict | None = None,
    extra: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Build the document. `stages` and `verdict` are left out where a command has none; `extra` is merged in."""
    built: dict[str, Any] = {
        "schema": SCHEMA,
        "command": command,
        "dsdoctor": dsdoctor.__version__,
        "created": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "exit_code": exit_code,
        "environment": dict(environment or {}),
    }
    if stages is not None:
        built["stages"] = [dict(stage) for stage in stages]
    built["findings"] = [asdict(finding) for finding in findings]
    if verdict is not None:
        built["verdict"] = asdict(verdict)
    built.update(extra or {})
    return built


def findings_of(built: Mapping[str, Any]) -> tuple[Finding, ...]:
    """The findings of a document that another process of the same release printed."""
    return tuple(
        Finding(
            **{
                **one,
                "evidence": tuple(Evidence(**each) for each in one["evidence"]),
                "fixes": tuple(Fix(**each) for each in one["fixes"]),
                "keys": tuple(one["keys"]),
            }
        )
        for one in built["findings"]
    )


def dumps(built: Mapping[str, Any]) -> str:
    """Strict JSON in valid UTF-8.

    Infinities and NaN, which JSON has no word for, become the strings inf, -inf and nan; half a character (from a file
    name that is not UTF-8, or a lone surrogate) becomes a question mark.
    """
    return json.dumps(_plain(built), indent=1, ensure_ascii=False, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, Mapping):
        return {_plain(str(key)): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, (bool, int, float)):
        return value
    return _plain(str(value))
