"""Findings that hold and yet are not what the job failed of.

A job can have two faults, and only one of them ended it. What the stages before the run foresaw, a defect of the
installed release and a key that nobody reads stay faults in their own right; but the verdict does not rest on them
where the runs show that the failure came of something else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dsdoctor.blame.families import is_config, is_environment
from dsdoctor.blame.view import View, is_numeric, too_big, view_of
from dsdoctor.case import Case
from dsdoctor.finding import Finding

_BEFORE_THE_RUN = ("environment", "memory")


def relevant(case: Case, findings: Sequence[Finding]) -> View:
    """The view of the rules of the verdict: without the roots that the runs show to be beside the point."""
    view = view_of(case, findings)
    return replace(view, roots=tuple(root for root in view.roots if not _aside(view, root)))


def in_order(case: Case, findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """The findings, those that are beside the point after the other errors."""
    view = view_of(case, findings)
    roots = sorted(view.roots, key=lambda root: _aside(view, root))
    return (*roots, *(finding for finding in findings if finding not in roots))


def _aside(view: View, finding: Finding) -> bool:
    if is_environment(finding):
        return _foreseen(finding) and _known_otherwise(view, finding)
    if finding.id == "version/known-defect":
        return view.fails_alike  # the plain run has no such defect
    return _of_lint(view, finding) and _raised_in_training(view)


def _foreseen(finding: Finding) -> bool:
    """It rests on the stages before the run alone. A defective GPU can spoil anything."""
    before = bool(finding.evidence) and all(evidence.source in _BEFORE_THE_RUN for evidence in finding.evidence)
    return before and not finding.id.startswith("hardware/")


def _known_otherwise(view: View, finding: Finding) -> bool:
    """It failed by its numbers, or with an exception that the config explains or that the plain run raises too.

    What both runs raise before the first step can be what was foreseen (libraries that do not go together), but for a
    want of memory, which has exceptions of its own.
    """
    if is_numeric(view.given_health):
        return True
    if view.given is None or not view.given.failures or too_big(view.given):
        return False
    both = view.fails_alike and (_trained(view) or finding.id.startswith("memory/"))
    return both or view.root(is_config) is not None


def _of_lint(view: View, finding: Finding) -> bool:
    """It rests on the ds_config alone, not on what a run did."""
    legs = {run.leg for run in view.case.runs}
    return finding.id.startswith("config/") and not any(evidence.source in legs for evidence in finding.evidence)


def _raised_in_training(view: View) -> bool:
    """An exception after the first step that the plain run raises too: keys are refused before there is a step."""
    ended = view.given_health is not None and view.given_health.trouble in ("raised", "exited")
    return ended and view.fails_alike and _trained(view)


def _trained(view: View) -> bool:
    return view.given is not None and view.given.steps_made > 0
