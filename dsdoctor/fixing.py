"""Apply the fixes of findings to the text of a ds_config, one after another, until no more can be applied."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from dsdoctor.case import Case
from dsdoctor.diagnoses import diagnose
from dsdoctor.dsconfig import edit, load
from dsdoctor.finding import Finding, Fix

_MOST = 100
"""Fixes for one file; a config that asks for more goes round in circles."""


@dataclass(frozen=True, kw_only=True)
class Fixed:
    """What came of it: the text, what was applied in order, and what could not be written into this file and why."""

    text: str
    applied: tuple[tuple[Finding, Fix], ...]
    refused: tuple[tuple[Finding, str], ...]


def fix(case: Case, text: str, *, unsafe: bool = False) -> Fixed:
    """Fix the case's config, whose text is given. The first patch of each finding is taken, if it is safe or `unsafe`.

    Notes (severity info) are left alone. Every fix is followed by a new look at the whole config, so that the result
    is a text that no fix would change any more.
    """
    applied: list[tuple[Finding, Fix]] = []
    refused: dict[tuple[str, tuple[str, ...]], tuple[Finding, str]] = {}
    seen = {text}
    while len(applied) < _MOST:
        for finding, chosen in _offers(case, text, unsafe=unsafe):
            if (finding.id, finding.keys) in refused:
                continue
            try:
                changed = edit.patched(text, chosen.patch or {})
                problem = "it would undo another fix" if changed in seen else ""
            except edit.NotEditable as error:
                changed, problem = text, str(error)
            if problem:
                refused[finding.id, finding.keys] = (finding, problem)
                continue
            text = changed
            seen.add(text)
            applied.append((finding, chosen))
            refused.clear()  # what could not be written before may be possible now
            break
        else:
            break
    return Fixed(text=text, applied=tuple(applied), refused=tuple(refused.values()))


def _offers(case: Case, text: str, *, unsafe: bool) -> Iterator[tuple[Finding, Fix]]:
    """What the rules have to say of the text, and the fix to take."""
    if case.config is None:
        return
    config = load.with_text(case.config, text)
    for finding in diagnose(replace(case, config=config)).findings:
        chosen = next((fix for fix in finding.fixes if fix.patch and (fix.safe or unsafe)), None)
        if finding.severity != "info" and chosen is not None:
            yield finding, chosen


def as_diff(path: str, before: str, after: str) -> str:
    """A unified diff that `patch` can apply; "" where nothing changed."""
    old, new = (text.splitlines(keepends=True) for text in (before, after))
    lines = (
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
        for line in difflib.unified_diff(old, new, fromfile=path, tofile=path)
    )
    return "".join(lines)


def back_up(path: Path) -> Path:
    """Copy the file beside itself under a name that is free, and return that."""
    number = 0
    while True:
        copy = path.with_name(f"{path.name}.bak{number or ''}")
        try:
            with copy.open("xb") as file:
                file.write(path.read_bytes())
        except FileExistsError:
            number += 1
        else:
            return copy
