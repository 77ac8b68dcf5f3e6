"""Findings for machines that show them beside the source: GitHub's workflow commands, and SARIF 2.1.0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import dsdoctor
from dsdoctor.diagnoses.base import Diagnosis
from dsdoctor.finding import Evidence, Finding

_COMMANDS = {"error": "error", "warning": "warning", "info": "notice"}
_LEVELS = {"error": "error", "warning": "warning", "info": "note"}
_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def github(findings: Sequence[Finding], path: str) -> str:
    """One workflow command a finding (docs: "Workflow commands for GitHub Actions"). `path` is the file checked."""
    return "\n".join(_command(finding, path) for finding in findings)


def _command(finding: Finding, path: str) -> str:
    place = _place(finding, path)
    values = {"file": place.source if place else path, "title": f"{finding.id}: {finding.title}"}
    if place is not None:
        values |= {"line": str(place.line)} | ({"col": str(place.column)} if place.column else {})
    properties = ",".join(f"{name}={_escaped(value, ':,')}" for name, value in values.items())
    return f"::{_COMMANDS[finding.severity]} {properties}::{_escaped(message(finding))}"


def _escaped(text: str, more: str = "") -> str:
    for sign in "%\r\n" + more:
        text = text.replace(sign, f"%{ord(sign):02X}")
    return text


def message(finding: Finding) -> str:
    """Cause and first fix in one paragraph."""
    fix = f"; {finding.fixes[0].text}" if finding.fixes else ""
    return f"{finding.cause}{fix}"


def sarif(findings: Sequence[Finding], path: str, catalogue: Mapping[str, Diagnosis]) -> dict[str, Any]:
    """One SARIF run. `catalogue` has the pages of the rules that are named."""
    rules = sorted({finding.id for finding in findings})
    driver = {
        "name": "dsdoctor",
        "version": dsdoctor.__version__,
        "rules": [_rule(identifier, catalogue[identifier]) for identifier in rules],
    }
    results = [_result(finding, rules.index(finding.id), path) for finding in findings]
    return {
        "$schema": _SCHEMA,
        "version": "2.1.0",
        "runs": [{"tool": {"driver": driver}, "columnKind": "unicodeCodePoints", "results": results}],
    }


def _rule(identifier: str, diagnosis: Diagnosis) -> dict[str, Any]:
    return {
        "id": identifier,
        "shortDescription": {"text": diagnosis.title},
        "fullDescription": {"text": diagnosis.page()},
        "defaultConfiguration": {"level": _LEVELS[diagnosis.severity]},
    }


def _result(finding: Finding, rule: int, path: str) -> dict[str, Any]:
    place = _place(finding, path)
    location: dict[str, Any] = {"artifactLocation": {"uri": place.source if place else path}}
    if place is not None:
        location["region"] = {"startLine": place.line} | ({"startColumn": place.column} if place.column else {})
    return {
        "ruleId": finding.id,
        "ruleIndex": rule,
        "level": _LEVELS[finding.severity],
        "message": {"text": message(finding)},
        "locations": [{"physicalLocation": location}],
    }


def _place(finding: Finding, path: str) -> Evidence | None:
    """The evidence to point at: a line of the file that was checked, else a line of any other."""
    placed = [evidence for evidence in finding.evidence if evidence.line is not None]
    return next((evidence for evidence in placed if evidence.source == path), placed[0] if placed else None)
