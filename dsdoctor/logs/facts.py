"""What the logs of a job say, as plain data: events, exceptions, how processes ended, the loss scale, series.

`dsdoctor.logs.read` makes it; rules look at it. Lines count from 1, by line feeds, after decompression. Steps are
optimizer steps as the log numbers them; None where the log has none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from dsdoctor.finding import Evidence
from dsdoctor.loss_scale import LossScaleHistory
from dsdoctor.runs.facts import Failure

End = Literal["finished", "failed", "open"]
"""How a log ends: with the message of a job that did its work, with one of a job that did not, or just so."""


@dataclass(frozen=True, kw_only=True)
class LogEvent:
    """One thing that a program printed and that means something; repeats of it on a rank are counted, not kept.

    `kind` is a name of `dsdoctor.logs.grammar`; `fields` are the groups of its pattern, as text. `line` is where it
    stands first, `last_line` where it stands last, `order` its place in the story of all files (smaller is earlier).
    `host` is the machine that printed it, None where neither a prefix nor the line itself says it.
    """

    kind: str
    text: str
    source: str
    line: int
    order: int
    last_line: int
    rank: int | None = None
    step: int | None = None
    host: str | None = None
    count: int = 1
    fields: Mapping[str, str] = field(default_factory=dict)

    def evidence(self) -> Evidence:
        """The line where it stands first."""
        return Evidence(source=self.source, line=self.line, rank=self.rank, step=self.step, text=self.text)


@dataclass(frozen=True, kw_only=True)
class ProcessExit:
    """The end of one process as its launcher reports it. `code` is negative for a signal.

    `rank` is a global rank, None where the report does not say which (the `deepspeed` launcher names the command of
    the rank that it started last, not of the one that died). `by_launcher` marks a process that the launcher itself
    stopped, which is a consequence.
    """

    code: int
    evidence: Evidence
    order: int
    rank: int | None = None
    by_launcher: bool = False


@dataclass(frozen=True, kw_only=True)
class Point:
    """One value of a series: the step as the log numbers it, the value (may be nan or inf), and its line."""

    step: float | None
    value: float
    evidence: Evidence


@dataclass(frozen=True, kw_only=True)
class Series:
    """One quantity over the steps (`loss`, `grad_norm`, `lr`), thinned where it is long.

    A thinned series keeps its first and last point, its extremes and the first non-finite ones.
    """

    name: str
    points: tuple[Point, ...]
    thinned: bool = False


@dataclass(frozen=True, kw_only=True)
class LogFacts:
    """Everything that was understood of the logs of one job.

    `failures` are the exceptions that ended a rank, oldest first. `steps_seen` counts the optimizer steps that the log
    shows. `config` is the ds_config found in it as a whole; `settings` are values of single dotted keys that other
    lines show (flags of the Trainer, lines of the engine). `versions` are the releases it names (`deepspeed`, ...).
    `unreadable` names the inputs, or parts of them, that could not be read, with the reason.
    """

    sources: tuple[str, ...] = ()
    lines: int = 0
    ranks: tuple[int, ...] = ()
    steps_seen: int = 0
    events: tuple[LogEvent, ...] = ()
    failures: tuple[Failure, ...] = ()
    exits: tuple[ProcessExit, ...] = ()
    loss_scale: LossScaleHistory | None = None
    series: tuple[Series, ...] = ()
    config: Mapping[str, Any] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    end: End = "open"
    last_line: Evidence | None = None
    last_progress: int | None = None
    """`order` of the last line that shows a training step done."""
    unreadable: tuple[str, ...] = ()
    unfinished: tuple[tuple[str, int], ...] = ()
    """Source and line of last lines that have no line end: more of them may be missing."""

    @property
    def silent(self) -> bool:
        """True if there was nothing to read: all inputs are empty, no text, or could not be read."""
        return (
            bool(self.unreadable) and len(self.unreadable) >= len(self.sources) and not (self.events or self.failures)
        )

    def of_kind(self, *kinds: str) -> Iterator[LogEvent]:
        """The events of these kinds, oldest first."""
        return (event for event in self.events if event.kind in kinds)

    def series_of(self, name: str) -> Series | None:
        """That series, or None where the log has none."""
        return next((series for series in self.series if series.name == name), None)
