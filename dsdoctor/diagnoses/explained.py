"""Whether a more specific diagnosis explains what a general one would only repeat."""

from __future__ import annotations

from collections.abc import Iterator

from dsdoctor.case import Case
from dsdoctor.diagnoses import context
from dsdoctor.diagnoses.base import Diagnosis
from dsdoctor.finding import Finding
from dsdoctor.runs.facts import Failure

GENERAL = (
    "launch/user-exception",
    "deepspeed/internal-error",
    "launch/peer-failure",
    "launch/abort",
    "launch/signal",
    "comm/nccl-error",
    "comm/failed-step",
)
"""What is said of an exception where nothing more specific is known."""


def explained(failure: Failure, case: Case) -> bool:
    """True if a finding of severity error, other than the general ones, shows that exception as its evidence."""
    return any(_shows(finding, failure) for finding in _specific(case) if finding.severity == "error")


def has_specific_root(case: Case) -> bool:
    """True if a more specific diagnosis than the general ones is a root of what went wrong."""
    return any(finding.severity == "error" and finding.role == "root" for finding in _specific(case))


def holds(case: Case, *identifiers: str) -> bool:
    """True if one of these diagnoses is found in the case."""
    from dsdoctor.diagnoses import ALL  # the catalogue contains the modules that ask

    return any(diagnosis.id in identifiers and _examined(diagnosis, case) for diagnosis in ALL)


def _specific(case: Case) -> Iterator[Finding]:
    from dsdoctor.diagnoses import ALL  # the catalogue contains the modules that ask

    for diagnosis in ALL:
        if diagnosis.id not in GENERAL:
            yield from _examined(diagnosis, case)


def _examined(diagnosis: Diagnosis, case: Case) -> list[Finding]:
    """The findings of one rule. One that crashes explains nothing; that it crashed is told where it runs itself."""
    try:
        return list(diagnosis.examine(case))
    except Exception:
        return []


def _shows(finding: Finding, failure: Failure) -> bool:
    own = context.evidence(failure)
    for evidence in finding.evidence:
        if own.line is not None and (evidence.source, evidence.line) == (own.source, own.line):
            return True
        if (evidence.source, evidence.rank, evidence.text) == (own.source, own.rank, own.text):
            return True
    return False
