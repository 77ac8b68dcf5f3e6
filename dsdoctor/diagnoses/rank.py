"""Order of findings: the most likely root first, consequences last."""

from __future__ import annotations

from collections.abc import Iterable

from dsdoctor.finding import Finding

_ROLE = {"root": 0, "consequence": 1}
_SEVERITY = {"error": 0, "warning": 1, "info": 2}


def ranked(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Sort by role, severity, confidence; equal ones keep the order in which their rules ran."""
    return tuple(sorted(findings, key=lambda f: (_ROLE[f.role], _SEVERITY[f.severity], -f.confidence)))
