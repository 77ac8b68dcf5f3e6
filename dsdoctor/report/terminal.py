"""What a person reads: one line a stage, then the verdict, then the findings with their evidence and fixes.

Colour only on a terminal (and not with NO_COLOR); text that came from the user's programs is shown without its control
characters, so that nothing in a log can drive the terminal.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from dsdoctor.blame.table import table
from dsdoctor.finding import Evidence, Finding, Verdict
from dsdoctor.units import seconds

if TYPE_CHECKING:
    from dsdoctor.triage import StageResult, Triage

_MARKS = {
    "passed": ("✓", "green"),
    "warned": ("!", "yellow"),
    "failed": ("✗", "red"),
    "timeout": ("✗", "red"),
    "crashed": ("✗", "red"),
    "skipped": ("–", "dim"),
}
_SEVERITY = {"error": ("✗", "red"), "warning": ("!", "yellow"), "info": ("i", "blue")}
_MOST_EVIDENCE = 6
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class _Console(Console):
    """Leaves a pipe that nobody reads to the command; rich would exit with 1, which means that an error was found."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


class Terminal:
    """Writes to one stream; `Terminal(sys.stderr)` for progress beside a JSON document."""

    def __init__(self, stream: IO[str]) -> None:
        self._console = _Console(file=stream, highlight=False, markup=False, emoji=False, soft_wrap=True)

    def line(self, text: str = "", style: str = "") -> None:
        self._console.print(Text(clean(text), style=style))

    def progress(self, text: str) -> None:
        """A line that the next one overwrites; nothing where the output is no terminal."""
        if self._console.is_terminal:
            self._console.print(Text(f"    {clean(text)}", style="dim"), end="\x1b[K\r")

    def stage(self, result: StageResult) -> None:
        """`[✓] comm  2 ranks over gloo, all values right (4.1 s)`."""
        mark, colour = _MARKS[result.status]
        text = Text()
        text.append(f"[{mark}] ", style=colour)
        text.append(f"{result.name:<19}", style="bold" if result.status != "skipped" else "dim")
        text.append(clean(result.why).replace("\n", " "), style="dim" if result.status == "skipped" else "")
        if result.status != "skipped":
            text.append(f" ({seconds(result.seconds)})", style="dim")
        self._console.print(text)

    def finding(self, finding: Finding) -> None:
        """Id and title, cause, evidence, caveat, fixes."""
        mark, colour = _SEVERITY[finding.severity]
        head = Text(f"\n{mark} ", style=colour)
        head.append(finding.id, style="bold")
        head.append(f"  {finding.title}")
        note = finding.severity + (", a consequence" if finding.role == "consequence" else "")
        head.append(f"  ({note}, {finding.confidence:.0%} sure)", style="dim")
        self._console.print(head)
        self.line(f"  {finding.cause}")
        for evidence in finding.evidence[:_MOST_EVIDENCE]:
            self.line(f"    {_where(evidence)}{evidence.text.strip()}", style="dim")
        if len(finding.evidence) > _MOST_EVIDENCE:
            self.line(f"    … and {len(finding.evidence) - _MOST_EVIDENCE} more", style="dim")
        if finding.caveat:
            self.line(f"  but: {finding.caveat}")
        for fix in finding.fixes:
            patch = f"  {json.dumps(fix.patch)}" if fix.patch else ""
            self.line(f"  → {fix.text}{patch}")

    def findings(self, findings: Sequence[Finding]) -> None:
        """Errors and warnings in full; what is only good to know in one line each."""
        for finding in findings:
            if finding.severity != "info":
                self.finding(finding)
        notes = [finding for finding in findings if finding.severity == "info"]
        if notes:
            self.line("\ngood to know:", style="dim")
        for note in notes:
            self.line(f"  {note.id}: {note.cause}", style="dim")

    def verdict(self, verdict: Verdict) -> None:
        colour = "green" if verdict.blame == "healthy" else "yellow" if verdict.blame == "inconclusive" else "red"
        text = Text("\n")
        text.append(verdict.blame, style=f"bold {colour}")
        text.append(f" ({verdict.confidence:.0%} sure): {clean(verdict.summary)}")
        self._console.print(text)
        if verdict.culprit:
            self.line(f"change in the ds_config: {', '.join(verdict.culprit)}", style="bold")

    def triage(self, result: Triage) -> None:
        """What comes after the stage lines: findings first, the verdict last, where the eye is."""
        self.findings(result.findings)
        self._first_bad(result)
        self._side_effects(result)
        self._legs(result)
        if result.stopped_early:
            self.line("\nstopped early: what follows rests on the stages that were finished", style="yellow")
        self.verdict(result.verdict)
        self.line(f"everything that was seen is in {result.job.folder}", style="dim")

    def _first_bad(self, result: Triage) -> None:
        details = next((stage.details for stage in result.stages if stage.name == "numerics"), {})
        if details.get("frames"):
            self.line("\nthe frames before the first non-finite value:", style="bold")
            self.line(str(details["frames"]).rstrip())
        if details.get("patch"):
            tried = any(
                trial["patch"] == details["patch"] and trial["outcome"] == "finite" for trial in _trials(details)
            )
            how = "tried on the same micro-batch" if tried else "not tried"
            self.line(f"\na patch for that module, ready to paste ({how}):", style="bold")
            self.line(str(details["patch"]).rstrip())
        if bundle := (details.get("examined") or {}).get("bundle"):
            self.line(f"\nthe micro-batch is kept: dsdoctor nan replay {bundle}", style="dim")
        if details.get("trace"):
            self.line(f"\nthe frames of the traced batches are in {details['trace']}", style="dim")
        if details.get("numbers"):
            told = f"dsdoctor nan compare {details['numbers']} OTHER"
            self.line(f"\nwhere another run parts from this one: {told}", style="dim")
        self._selftest(details.get("selftest") or [])

    def _selftest(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """A line for each planted fault: what, where, and what the detector named."""
        if rows:
            self.line("\nplanted faults:", style="bold")
        for row in rows:
            mark = {True: "✓", False: "✗", None: "–"}[row["right"]]
            place = f" in {row['planted']}" if row["planted"] != "nothing" and row["planted"] else ""
            self.line(f"  {mark} {row['fault']}{place} → {row['why'] or row['found']}")

    def _legs(self, result: Triage) -> None:
        """A line for each leg, where more than one was run."""
        cells = table(result.case)
        if sum(cell.outcome != "not run" for cell in cells) < 2:
            return
        self.line("\nthe legs:", style="bold")
        for cell in cells:
            style = "dim" if cell.outcome == "not run" else ""
            self.line(f"  {cell.engine:<18} {cell.precision:<5} {cell.text}", style=style)

    def _side_effects(self, result: Triage) -> None:
        notes = {note: None for run in result.case.runs for note in run.notes}
        written = sorted({path for run in result.case.runs for path in run.written})
        if notes:
            self.line("\nwhat dsdoctor changed for these runs:", style="dim")
        for note in notes:
            self.line(f"  {note}", style="dim")
        if written:
            shown = ", ".join(written[:5]) + (f" and {len(written) - 5} more" if len(written) > 5 else "")
            self.line(f"the script itself wrote in the working directory: {shown}", style="yellow")


def _trials(details: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """The remedies that were tried, as the document has them."""
    found: Sequence[Mapping[str, Any]] = (details.get("examined") or {}).get("trials") or ()
    return found


def clean(text: str) -> str:
    """Without control characters other than newline and tab, and without lone surrogates."""
    return _CONTROL.sub("", text).encode("utf-8", "replace").decode("utf-8")


def _where(evidence: Evidence) -> str:
    parts = [evidence.source]
    if evidence.line is not None:
        parts[0] += f":{evidence.line}" + (f":{evidence.column}" if evidence.column is not None else "")
    if evidence.rank is not None:
        parts.append(f"rank {evidence.rank}")
    if evidence.step is not None:
        parts.append(f"step {evidence.step}")
    return ", ".join(part for part in parts if part) + ": "
