"""Keys of the config that could explain a failed run, each with the change that would prove it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dsdoctor.case import Case
from dsdoctor.finding import Finding

_PRECISION_KEYS = {"fp16.enabled", "bf16.enabled", "bfloat16.enabled"}


@dataclass(frozen=True, kw_only=True)
class Suspect:
    """The dotted keys and the merge patch of the ds_config that changes only them."""

    keys: tuple[str, ...]
    patch: Mapping[str, Any]


def suspects(case: Case, findings: Sequence[Finding]) -> list[Suspect]:
    """The findings of lint that are a risk, not yet a proof, and bring a patch, most confident first.

    An error of lint needs no proof, and switching the precision off is a control, not a proof.
    """
    if case.config is None or any(f.severity == "error" and f.id.startswith("config/") for f in findings):
        return []
    found = []
    for finding in sorted(findings, key=lambda f: -f.confidence):
        patch = next((fix.patch for fix in finding.fixes if fix.patch), None)
        risky = finding.id.startswith("config/") and finding.severity == "warning" and finding.id not in _HARMLESS
        if risky and patch and finding.keys and not _PRECISION_KEYS & set(finding.keys):
            found.append(Suspect(keys=finding.keys, patch=patch))
    return found


_HARMLESS = {"config/ineffective", "config/deprecated", "config/unknown-key"}
"""Warnings about keys that do nothing, which cannot make a run fail."""
