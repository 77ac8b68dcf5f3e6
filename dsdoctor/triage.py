"""The staged triage: the stages in order, what each needs, and what a failed one lets the next do.

Every stage is a function from what is known so far to a `StageResult`; it adds the facts that it collected to the
`Examination`. A stage that crashes is a recorded result, not the end. The verdict comes from the facts by rules.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from dsdoctor.blame.aside import in_order
from dsdoctor.blame.verdict import decide
from dsdoctor.case import Case
from dsdoctor.diagnoses import diagnose
from dsdoctor.finding import Finding, Verdict
from dsdoctor.job import Job
from dsdoctor.machine.facts import MachineFacts

Status = Literal["passed", "failed", "warned", "skipped", "timeout", "crashed"]

STAGES = (
    "environment",
    "config",
    "comm",
    "memory",
    "with-deepspeed",
    "without-deepspeed",
    "control-fp32",
    "numerics",
    "bisect",
)


_ALWAYS = ("environment", "config")
"""Quick, and every later stage needs what they learn."""


@dataclass(frozen=True, kw_only=True)
class StageResult:
    """How a stage ended, in one line, with what it saw for the JSON document."""

    name: str
    status: Status
    why: str = ""
    seconds: float = 0.0
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class Examination:
    """What is known so far. Stages replace `case` with a fuller one; `tell` and `progress` speak to the user."""

    job: Job
    case: Case = field(default_factory=Case)
    results: list[StageResult] = field(default_factory=list)
    tell: Callable[[str], None] = lambda text: None
    progress: Callable[[str], None] = lambda text: None
    interrupted: bool = False
    out_of_budget: bool = False

    @property
    def machine(self) -> MachineFacts:
        return self.case.machine or MachineFacts()

    def learn(self, **parts: Any) -> None:
        """Add facts to the case."""
        self.case = replace(self.case, **parts)

    def result(self, name: str) -> StageResult | None:
        return next((result for result in self.results if result.name == name), None)


Stage = Callable[[Examination], StageResult]


@dataclass(frozen=True, kw_only=True)
class Triage:
    """The finished examination."""

    job: Job
    case: Case
    stages: tuple[StageResult, ...]
    findings: tuple[Finding, ...]
    verdict: Verdict
    stopped_early: bool = False
    broken_rules: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """3 stopped early, 4 inconclusive, 1 an error was found or somebody is to blame, 0 nothing wrong."""
        if self.stopped_early:
            return 3
        if self.verdict.blame == "inconclusive":
            return 4
        wrong = self.verdict.blame != "healthy" or any(finding.severity == "error" for finding in self.findings)
        return 1 if wrong else 0


def triage(
    job: Job,
    *,
    done: Callable[[StageResult], None] = lambda result: None,
    tell: Callable[[str], None] = lambda text: None,
    progress: Callable[[str], None] = lambda text: None,
) -> Triage:
    """Run the stages that the job asks for.

    `done` is called as each ends, `tell` with a line worth keeping, `progress` with one that the next may replace.
    """
    from dsdoctor.stages import ALL

    examination = Examination(job=job, tell=tell, progress=progress)
    for name in STAGES:
        if job.stages and name not in (*job.stages, *_ALWAYS):
            continue
        if job.remaining() <= 0:
            examination.out_of_budget = True
            break
        result = _run(name, ALL[name], examination)
        examination.results.append(result)
        done(result)
        if examination.interrupted:
            break
    return _finish(examination)


def _run(name: str, stage: Stage, examination: Examination) -> StageResult:
    began = time.monotonic()
    try:
        result = stage(examination)
    except KeyboardInterrupt:
        examination.interrupted = True
        result = StageResult(name=name, status="skipped", why="stopped by the user")
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        result = StageResult(name=name, status="crashed", why=why, details={"traceback": traceback.format_exc()})
    return replace(result, name=name, seconds=round(time.monotonic() - began, 1))


def _finish(examination: Examination) -> Triage:
    diagnosis = diagnose(examination.case)
    return Triage(
        job=examination.job,
        case=examination.case,
        stages=tuple(examination.results),
        findings=in_order(examination.case, diagnosis.findings),
        verdict=decide(examination.case, diagnosis.findings),
        stopped_early=examination.interrupted or examination.out_of_budget,
        broken_rules=diagnosis.broken,
    )
