"""What all sources together have told so far: the accumulators that a scan fills, and the facts made of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from dsdoctor.finding import Evidence
from dsdoctor.logs.endings import Endings
from dsdoctor.logs.facts import End, LogEvent, LogFacts, ProcessExit
from dsdoctor.logs.grammar import FIGURES
from dsdoctor.logs.grammar_ranks import ENDS
from dsdoctor.logs.precision import precision_of, scale_settings
from dsdoctor.logs.progress import Progress
from dsdoctor.logs.series import MAX_TEXT, SeriesBuilder
from dsdoctor.logs.timeline import ScaleTimeline, SkipCounter, history
from dsdoctor.loss_scale import MINIMUM_REACHED, LossScaleHistory, SkipCount
from dsdoctor.runs.facts import Failure

_COUNTERS = ("skip-count", "skips-since")
MAX_EVENTS = 400
"""Events kept of a kind, each with a count of its repeats; and the latest one."""
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
    _endings: Endings = field(init=False)

    def __post_init__(self) -> None:
        self._endings = Endings(self.progress)

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
        key += (self.progress.attempt(place.source),) if kind in ENDS else ()
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
        order, proof = self.tick(), place.evidence(self.step)
        self._endings.exit(ProcessExit(code=code, evidence=proof, order=order, rank=rank, by_launcher=by_launcher))

    def failure(self, failure: Failure, shown: int) -> None:
        """An exception; `shown` is what `progress.shown` was when it came."""
        self._endings.failure(failure, self.tick(), shown)

    def facts(self, sources: tuple[str, ...]) -> LogFacts:
        """Everything that was understood."""
        exits = self._endings.exits()
        failures = self._endings.failures(exits, self.last.line if self.last is not None else None)
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
