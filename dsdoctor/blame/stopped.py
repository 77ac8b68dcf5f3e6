"""What the words of an ending say of its numbers: a script that stops itself for a bad loss, a type that is refused.

Pure functions of a run. Much code looks at its loss before it runs backward from it, and ends there (`sys.exit`, an
`assert`, an exception): DeepSpeed is then never handed the loss that was bad.
"""

from __future__ import annotations

import re

from dsdoctor.frames import users_line
from dsdoctor.runs.facts import Failure, RankRun, Run

_NOT_FINITE = re.compile(r"(?i)(?<![\w'\"])(?:nans?|non-?finite|not finite|[-+]?inf(?:inite|inity|s)?)(?![\w'\"])")
_ENDS = re.compile(
    r"(?i)\b(?:stop|abort|exit|terminat|quit|halt|diverge)\w*|\b(?:is|became|turned|went|found|detected)\b"
)
_TESTED = re.compile(r"\b(?:isfinite|isnan|isinf)\b")
_TYPES = re.compile(
    r"(?i)same dtype|scalar ?type|should be the same|dtypes match|expected .*\bdtype\b"
    r"|not implemented for '(?:half|bfloat16)'"
)
_LOOKUPS = ("KeyError", "IndexError", "AttributeError", "NameError", "ImportError", "ModuleNotFoundError", "OSError")
"""Exceptions whose message is a name, which may well be called nan or inf."""
_USAGE = 2
"""The exit code of argparse for arguments that it refuses."""


def for_its_numbers(run: Run) -> tuple[RankRun, str] | None:
    """The rank that ended itself since a number was not finite, with its words; None if none says so."""
    for rank in run.ranks if run.outcome == "raised" else ():
        if rank.failure is not None and _of_a_number(rank.failure):
            return rank, _said(rank.failure)
    if run.outcome != "exited":
        return None
    for rank in run.ranks:
        lines = rank.printed.splitlines() if rank.exit_code not in (None, 0, _USAGE) and rank.failure is None else []
        line = next((line for line in lines if _NOT_FINITE.search(line) and _ENDS.search(line)), None)
        if line is not None:
            return rank, line.strip()
    return None


def for_a_type(run: Run) -> bool:
    """Whether an operation refused the types that the precision of the config gave it."""
    return run.outcome == "raised" and any(_TYPES.search(failure.message) for failure in run.failures)


def _of_a_number(failure: Failure) -> bool:
    if failure.type.rpartition(".")[2] in _LOOKUPS:
        return False
    if failure.type == "FloatingPointError" or _NOT_FINITE.search(failure.message):
        return True
    line = users_line(failure.frames)
    return failure.type == "AssertionError" and line is not None and _TESTED.search(line.text) is not None


def _said(failure: Failure) -> str:
    lines = failure.message.strip().splitlines()
    return f"{failure.type}: {lines[0]}" if lines else failure.type
