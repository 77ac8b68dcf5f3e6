"""The diagnosis of logs as a whole: what `dsdoctor log` prints and `dsdoctor.analyze_log` returns."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dsdoctor.case import Case
from dsdoctor.diagnoses import diagnose
from dsdoctor.dsconfig import load_config
from dsdoctor.dsconfig.facts import ConfigFacts
from dsdoctor.finding import Evidence, Finding, exit_code
from dsdoctor.logs.facts import LogFacts
from dsdoctor.logs.follow import Follower
from dsdoctor.logs.read import read_logs
from dsdoctor.runs.facts import Failure

DOUBTFUL = 0.5
"""Confidence in what rests on a line that may not mean what it seems to."""
BETWEEN_LOOKS = 0.3
"""Seconds between two looks at logs that are followed."""
PATIENCE = 5.0
"""Seconds after which a log is diagnosed though it does not come to rest."""
GOES_ON = 5
"""Lines after an exception of no known rank from which on its process hardly died of it."""


@dataclass(frozen=True, kw_only=True)
class LogAnalysis:
    """What logs say and what it means; `broken` holds the tracebacks of rules that crashed."""

    logs: LogFacts
    case: Case
    findings: tuple[Finding, ...]
    broken: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """1 with a finding of severity error, else 0."""
        return exit_code(self.findings)

    def to_dict(self) -> dict[str, Any]:
        """The JSON document of `dsdoctor log --json`."""
        from dsdoctor.report.document import document
        from dsdoctor.report.logs import sections

        return document("log", exit_code=self.exit_code, findings=self.findings, extra=sections(self.case))


def analyze_log(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    config: str | os.PathLike[str] | None = None,
) -> LogAnalysis:
    """Read logs and diagnose them. A folder stands for all logs in it, `-` for standard input.

    `config` is the ds_config of the job, where the log does not hold it. Raises `dsdoctor.logs.read.Unreadable` if
    nothing can be read, `dsdoctor.dsconfig.ConfigUnreadable` for the config.
    """
    chosen = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    given = load_config(Path(config)) if config is not None else None
    return analyze_facts(read_logs(chosen, config=given.data if given is not None else None), given)


def follow_log(
    paths: Sequence[str | os.PathLike[str]], *, config: str | os.PathLike[str] | None = None
) -> Iterator[tuple[LogAnalysis, bool | None]]:
    """The diagnosis of logs that are still being written, again whenever they have grown and come to rest.

    With each comes None; with the last one whether the user stopped it (Ctrl-C), rather than that all inputs ended.
    Raises as `analyze_log` does.
    """
    given = load_config(Path(config)) if config is not None else None
    follower = Follower(paths, config=given.data if given is not None else None)
    stopped, fresh, seen = False, True, time.monotonic()
    try:
        while not follower.ended:
            grown = follower.poll()
            fresh = fresh or grown
            if fresh and (not grown or time.monotonic() - seen > PATIENCE):
                fresh, seen = False, time.monotonic()
                yield analyze_facts(follower.facts(), given), None
            time.sleep(BETWEEN_LOOKS)
    except KeyboardInterrupt:
        stopped = True
    yield analyze_facts(follower.facts(), given), stopped


def analyze_facts(logs: LogFacts, config: ConfigFacts | None = None) -> LogAnalysis:
    """Diagnose what logs say."""
    case = Case(config=config, logs=logs)
    diagnosed = diagnose(case)
    findings = tuple(_tempered(finding, logs) for finding in diagnosed.findings)
    return LogAnalysis(logs=logs, case=case, findings=findings, broken=diagnosed.broken)


def _tempered(finding: Finding, logs: LogFacts) -> Finding:
    """A finding that rests on a line that may be cut off, or that nobody died of, is held for likely at most."""
    doubt = next((doubt for evidence in finding.evidence if (doubt := _doubt(evidence, logs))), "")
    if not doubt:
        return finding
    caveat = f"{finding.caveat} {doubt}" if finding.caveat else doubt
    return replace(finding, confidence=min(finding.confidence, DOUBTFUL), caveat=caveat)


def _doubt(evidence: Evidence, logs: LogFacts) -> str:
    if (evidence.source, evidence.line) in logs.unfinished:
        return "The log ends in the middle of this line."
    if len(logs.sources) != 1 or logs.exits:
        return ""
    raised = [f for f in logs.failures if f.rank is None and (f.source, f.line) == (evidence.source, evidence.line)]
    if any(_went_on(failure, logs) for failure in raised):
        return "Training goes on after it, and the log ends without saying that a process has failed."
    if any(logs.lines - max(failure.message_lines, default=logs.lines) >= GOES_ON for failure in raised):
        return "The log goes on after it, and ends without saying that a process has failed."
    if logs.steps_seen and any([frame.function for frame in failure.frames] == ["<module>"] for failure in raised):
        return "The log ends there: in the midst of training, a traceback this short may be a quotation."
    return ""


def _went_on(failure: Failure, logs: LogFacts) -> bool:
    """True if the log shows a step after this exception."""
    told = max((series.points[-1].evidence.line or 0 for series in logs.series if series.points), default=0)
    return told > (failure.line or told) or (failure.step is not None and logs.steps_seen > failure.step)
