"""The vocabulary of every answer: evidence, fix, finding, verdict.

These are the words of the JSON document that the commands print. They hold no torch types and no text layout:
rules in `dsdoctor.diagnoses` make them, `dsdoctor.report` shows them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

Severity = Literal["error", "warning", "info"]
Role = Literal["root", "consequence"]
Blame = Literal["environment", "config", "precision", "script", "deepspeed", "healthy", "inconclusive"]
Phase = Literal["input", "parameter", "forward", "loss", "backward", "reduction", "step"]
PHASES: tuple[Phase, ...] = get_args(Phase)
"""In their order within a micro-step."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """One thing that was seen: a line of a file, a number of a run, a fact of the machine.

    `source` is a file path or the name of a stage; `line` and `column` count from 1; `step` counts optimizer steps
    from 0.
    """

    source: str
    text: str
    line: int | None = None
    rank: int | None = None
    step: int | None = None
    column: int | None = None


@dataclass(frozen=True, kw_only=True)
class Fix:
    """What to do. `patch` is an RFC 7386 merge patch of the ds_config, where the fix is one.

    A `safe` patch may be applied unasked: the config means the same with it, or DeepSpeed refuses the config without
    it and there is only one way to read what was meant.
    """

    text: str
    patch: Mapping[str, Any] | None = None
    safe: bool = False


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One diagnosis that holds for this job. `confidence` is between 0 and 1."""

    id: str
    severity: Severity
    role: Role
    confidence: float
    title: str
    cause: str
    evidence: tuple[Evidence, ...]
    caveat: str | None = None
    fixes: tuple[Fix, ...] = ()
    keys: tuple[str, ...] = ()
    """The dotted ds_config keys that the finding is about, the guilty one first."""


def exit_code(findings: Iterable[Finding]) -> int:
    """What a command ends with that found these: 1 with one of severity error, else 0."""
    return 1 if any(finding.severity == "error" for finding in findings) else 0


@dataclass(frozen=True, kw_only=True)
class FirstBad:
    """The first non-finite value of a run, in time over all ranks.

    `step` counts optimizer steps attempted before (skipped ones included), `micro_step` micro-steps within the step;
    both from 0. `module` is the name in `named_modules()` of the user's model. `kind` is inf, nan or inf+nan; `op` an
    aten name without overload; `cause` one of the classes that the JSON contract lists. `detail` is the evidence of the
    cause in words, `dtype` the torch name of the tensor's type, `line` the user's own line as `file:number: text`.
    """

    rank: int
    step: int
    micro_step: int
    phase: Phase
    module: str
    tensor: str
    kind: str
    op: str | None = None
    cause: str = "unknown"
    detail: str = ""
    dtype: str = ""
    line: str | None = None


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Who is to blame, in one sentence. `culprit` holds dotted ds_config keys."""

    blame: Blame
    summary: str
    confidence: float
    culprit: tuple[str, ...] = ()
    first_bad: FirstBad | None = None
