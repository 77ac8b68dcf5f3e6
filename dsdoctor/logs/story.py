"""What all sources together have told so far: the accumulators that a scan fills, and the facts made of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from dsdoctor.finding import Evidence
from dsdoctor.logs.facts import End, LogEvent, LogFacts, ProcessExit
from dsdoctor.logs.grammar_ranks import ENDS
from dsdoctor.logs.precision import precision_of, scale_settings
from dsdoctor.logs.progress import THAT_CLEARS, Progress
from dsdoctor.logs.series import MAX_TEXT, SeriesBuilder
from dsdoctor.logs.timeline import ScaleTimeline, SkipCounter, history
from dsdoctor.loss_scale import LossScaleHistory, SkipCount
from dsdoctor.runs.facts import Failure

_COUNTERS = ("skip-count", "skips-since")
FIGURES = {
    "forward": "forward_ms",
    "backward": "backward_ms",
    "step": "step_ms",
    "iteration": "iteration_ms",
    "samples": "samples_per_s",
    "memory": "memory_gib",
    "loss": "loss",
}
"""Series by the names of the groups that rows of the kind `figures` have."""
MINIMUM_REACHED = "Current loss scale already at minimum"
MAX_FAILURES = 200
MAX_EVENTS = 400
"""Events kept of a kind, each with a count of its repeats; and the latest one."""
MAX_EXITS = 2000
MAX_RANKS = 100_000
"""Ranks that are listed: no job has more."""


@dataclass
class Place:
    """Where a line stands: the source, the line, the rank, and the time if lines of that source have one."""

    source: str
    line: int
    rank: int | None
    time: float | None
    text: str
    host: str | None = None

    def evidence(self, step: int | None) -> Evidence:
        return Evidence(source=self.source, line=self.line, rank=self.rank, step=step, text=self.text[:MAX_TEXT])


@dataclass
class _Counted:
    first: LogEvent
    count: int = 1
    last_line: int = 0
    reached: int = 0
    """The step that its source had reached when it came last."""


@dataclass
class _Candidate:
    failure: Failure
    order: int
    progress: int
    passed: int
    """Steps that were done from when it came to when its last line was read."""
    reached: int
    """The step that its source had reached then."""


@dataclass
class _Exited:
    exit: ProcessExit
    reached: int


@dataclass
class Story:
    """The accumulators."""

    lines: int = 0
    source: str = ""
    """The source that is being read."""
    progress: Progress = field(default_factory=Progress)
    scale: ScaleTimeline = field(default_factory=ScaleTimeline)
    skips: SkipCounter = field(default_factory=SkipCounter)
    config: Mapping[str, Any] | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    ranks: set[int] = field(default_factory=set)
    unreadable: list[str] = field(default_factory=list)
    unfinished: list[tuple[str, int]] = field(default_factory=list)
    last: Place | None = None
    series: dict[str, SeriesBuilder] = field(default_factory=dict)
    _order: int = 0
    _events: dict[tuple[object, ...], _Counted] = field(default_factory=dict)
    _kinds: Counter[str] = field(default_factory=Counter)
    _exits: dict[tuple[int | None, int], _Exited] = field(default_factory=dict)
    _failures: list[_Candidate] = field(default_factory=list)

    def saw(self, *ranks: int) -> None:
        """These ranks have printed something."""
        if len(self.ranks) < MAX_RANKS:
            self.ranks.update(ranks)

    def tick(self) -> int:
        """The place of the next item in the story."""
        self._order += 1
        return self._order

    @property
    def step(self) -> int | None:
        """The last step that a line of progress named."""
        return self.progress.step

    def done(self, step: int) -> None:
        """A step was done."""
        self.progress.done(self.source, step, self.tick())

    def shown(self, count: int) -> None:
        """The source has shown `count` lines about steps that have no number: at least so many steps were done."""
        self.progress.counted(self.source, count, self.tick())

    def builder(self, name: str) -> SeriesBuilder:
        """The series of this name in the making, from its first value on."""
        if name not in self.series:
            self.series[name] = SeriesBuilder(name)
        return self.series[name]

    def value(self, name: str, number: float, place: Place) -> None:
        self.builder(name).add(self.step, number, place.line, place.source, place.rank, place.text[:MAX_TEXT])

    def event(self, kind: str, fields: Mapping[str, str], place: Place) -> None:
        if kind == "iteration-overflowed":
            self.scale.iteration = int(fields["step"])
            return
        if kind in _COUNTERS:
            self._counted(kind, fields, place)
            return
        if kind == "figures":
            self._figures(fields, place)
            return
        order = self.tick()
        if kind == "finished":
            self.progress.ended(place.source, place.line, order, work="exits successfully" not in place.text)
        key: tuple[object, ...] = (kind, place.source, place.rank, tuple(sorted(fields.items())))
        known = self._events.get(key)
        if known is not None:
            known.count += 1
            known.last_line = place.line
            known.reached = self.progress.reached(place.source)
            return
        if self._kinds[kind] < MAX_EVENTS:
            self._kinds[kind] += 1
        else:
            key = ("latest", kind)
        first = LogEvent(
            kind=kind,
            text=place.text[:MAX_TEXT],
            source=place.source,
            line=place.line,
            last_line=place.line,
            order=order,
            rank=place.rank,
            step=self.step,
            host=place.host,
            fields=dict(fields),
        )
        self._events[key] = _Counted(first, last_line=place.line, reached=self.progress.reached(place.source))

    def again(self, kind: str, rank: int | None, count: int) -> None:
        """An event without fields that the story knows came so many times more."""
        known = self._events.get((kind, self.source, rank, ()))
        if known is not None:
            known.count += count

    def _counted(self, kind: str, fields: Mapping[str, str], place: Place) -> None:
        scale = float(fields["scale"]) if "scale" in fields else None
        step, skipped = int(fields["step"]), int(fields.get("skipped", "0"))
        if scale is not None:
            self.value("loss_scale", scale, place)
        count = SkipCount(step=step, skipped=skipped, scale=scale, evidence=place.evidence(step))
        add = self.skips.add if kind == "skip-count" else self.skips.add_since
        add((place.source, place.rank, self.progress.attempt(place.source)), count)

    def _figures(self, fields: Mapping[str, str], place: Place) -> None:
        for name, text in fields.items():
            self.value(FIGURES[name], float(text), place)

    def exit(self, code: int, rank: int | None, place: Place, *, by_launcher: bool = False) -> None:
        order = self.tick()
        exit = ProcessExit(
            code=code, evidence=place.evidence(self.step), order=order, rank=rank, by_launcher=by_launcher
        )
        reached = self.progress.reached(place.source)
        if len(self._exits) >= MAX_EXITS and (rank, code) not in self._exits:
            return
        self._exits.setdefault((rank, code), _Exited(exit, reached)).reached = reached

    def failure(self, failure: Failure, progress: int) -> None:
        """An exception; `progress` is what `progress.shown` was when it came."""
        if len(self._failures) < MAX_FAILURES:
            reached = self.progress.reached(failure.source)
            passed = self.progress.shown - progress
            self._failures.append(_Candidate(failure, self.tick(), progress, passed, reached))

    def facts(self, sources: tuple[str, ...]) -> LogFacts:
        """Everything that was understood."""
        exits = tuple(
            exited.exit
            for exited in self._exits.values()
            if not self.progress.went_on(exited.exit.evidence.source, exited.reached, exited.exit.evidence.line)
        )
        failures = tuple(candidate.failure for candidate in self._kept(exits))
        begins = self.progress.begins()
        series = tuple(one for builder in self.series.values() if (one := builder.build(begins)).points)
        end = self._end(failures, exits)
        return LogFacts(
            sources=sources,
            lines=self.lines,
            ranks=tuple(sorted(self.ranks)),
            steps_seen=self.progress.most(),
            events=tuple(self._all_events()),
            failures=failures,
            exits=exits,
            loss_scale=self._history(failures, end, begins),
            series=series,
            config=self.config,
            settings=self.settings,
            versions=self.versions,
            end=end,
            last_line=self.last.evidence(self.step) if self.last is not None else None,
            last_progress=self.progress.last,
            unreadable=tuple(self.unreadable),
            unfinished=tuple(self.unfinished),
        )

    def _survived(self, candidate: _Candidate) -> bool:
        """True if steps were done after that exception, and not only those that another source tells of."""
        later = self.progress.shown - candidate.progress
        reached = self.progress.reached(candidate.failure.source)
        passed = candidate.passed if reached <= candidate.reached else later
        return passed >= THAT_CLEARS

    def _kept(self, exits: tuple[ProcessExit, ...]) -> list[_Candidate]:
        """The exceptions that were not survived, oldest first.

        Where a process failed by itself and no such exception is left, what it printed before came late, out of a
        buffer: then the last exception counts.
        """
        died = any(exit.code != 0 for exit in exits)
        kept = [candidate for candidate in self._failures if not self._survived(candidate)]
        if not kept and any(exit.code > 0 for exit in exits):
            kept = self._failures[-1:]
        finished = self.progress.finished
        if finished is not None and not died:
            kept = [candidate for candidate in kept if not self._worked_on(candidate, finished)]
        kept = self._believed(kept, died)
        timed = all(candidate.failure.time is not None for candidate in kept)
        return sorted(kept, key=lambda c: ((c.failure.time or 0.0) if timed else 0.0, c.order))

    def _worked_on(self, candidate: _Candidate, finished: int) -> bool:
        """True if the work was done after that exception, which may have been read as a whole only later."""
        failure = candidate.failure
        return candidate.order <= finished or self.progress.finished_after(failure.source, failure.line)

    def _believed(self, kept: list[_Candidate], died: bool) -> list[_Candidate]:
        """Without the lines `Type: message` that no traceback and no rank belongs to, unless the log ends with one.

        A script prints such a line of an exception that it has caught; the end of a log that was pasted is one too.
        """
        alone = [candidate for candidate in kept if not candidate.failure.frames and candidate.failure.rank is None]
        full = [candidate for candidate in kept if candidate not in alone]
        if full or not alone:
            return full
        ends = self.last is not None and self.last.line in alone[-1].failure.message_lines
        return alone if died or ends else []

    def _all_events(self) -> list[LogEvent]:
        lasting = (
            c
            for c in self._events.values()
            if c.first.kind not in ENDS or not self.progress.went_on(c.first.source, c.reached, c.last_line)
        )
        found = [replace(c.first, count=c.count, last_line=c.last_line) for c in lasting]
        return sorted(found, key=lambda event: event.order)

    def _end(self, failures: tuple[Failure, ...], exits: tuple[ProcessExit, ...]) -> End:
        if failures or any(exit.code != 0 for exit in exits):
            return "failed"
        return "finished" if self.progress.finished is not None else "open"

    def _history(self, failures: tuple[Failure, ...], end: End, begins: int) -> LossScaleHistory | None:
        precision = precision_of(self.config, self.settings)
        lines = self.scale.lines(precision, begins)
        raised = next((f for f in failures if MINIMUM_REACHED in f.message), None)
        proof = None
        if raised is not None:
            text = f"{raised.type}: {raised.message}".splitlines()[0]
            proof = Evidence(source=raised.source, line=raised.line, rank=raised.rank, step=raised.step, text=text)
        losses = [point.value for point in self.series["loss"].build(begins).points] if "loss" in self.series else []
        # The Trainer prints 0.0 for a loss that is not finite, so a 0.0 at the end says nothing.
        known = bool(losses) and losses[-1] != 0
        return history(
            lines,
            unlisted=self.scale.unlisted(lines),
            counts=self.skips.counts(begins),
            settings=scale_settings(self.config, self.settings),
            precision=precision,
            steps_seen=self.progress.most() or None,
            first_step=self.progress.first_step,
            raised=proof,
            loss_finite=all(map(math.isfinite, losses)) if known else None,
            ended=end != "open",
        )
