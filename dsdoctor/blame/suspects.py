"""Keys of the config that could explain a failed run, each with the change that would prove it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dsdoctor.blame.changes import Change
from dsdoctor.case import Case
from dsdoctor.finding import Finding

_PRECISION_KEYS = {"fp16.enabled", "bf16.enabled", "bfloat16.enabled"}


def suspects(case: Case, findings: Sequence[Finding]) -> list[Change]:
    """What a rule calls a risk, not yet a proof, and can change by a patch, most confident first.

    An error of lint needs no proof, unless a section with a misspelled name is missing: that may be the reason of the
    error. Switching the precision off is a control, not a proof.
    """
    if case.config is None:
        return []
    proved = any(f.severity == "error" and f.id.startswith("config/") for f in findings)
    found = []
    for finding in sorted(findings, key=lambda f: -f.confidence):
        patch = next((fix.patch for fix in finding.fixes if fix.patch), None)
        misspelled = finding.id == "config/unknown-key" and patch is not None and _sets_something(patch)
        risky = finding.id.startswith("config/") and finding.id not in _HARMLESS and not proved
        risky = risky or finding.id in _TO_BE_TESTED
        if finding.severity != "warning" or patch is None or not finding.keys or not (misspelled or risky):
            continue
        if not _PRECISION_KEYS & set(finding.keys):
            found.append(Change(keys=finding.keys, patch=patch, group="suspicion"))
    return found


def _sets_something(patch: Mapping[str, Any]) -> bool:
    """True for a patch that does more than drop keys."""
    return any(_sets_something(v) if isinstance(v, Mapping) else v is not None for v in patch.values())


_HARMLESS = {"config/ineffective", "config/deprecated", "config/unknown-key"}
"""Warnings about keys that do nothing, which cannot make a run fail; what a misspelled one should have done may."""
_TO_BE_TESTED = {"numerics/overlap-comm-race"}
"""What only runs with the key switched can show."""
