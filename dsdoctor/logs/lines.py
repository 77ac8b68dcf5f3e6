"""What one line says: it is taken out of what is around it, matched with the grammar, and told to the story.

While a traceback or a config is open, `attention` asks that the next lines be read one by one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dsdoctor.frames import owner
from dsdoctor.logs import grammar
from dsdoctor.logs.collected import Collected
from dsdoctor.logs.configs import BEGINS, ONE_LINE_KEYS, ConfigBlock, parse
from dsdoctor.logs.grammar_ranks import EXITS, WORDS
from dsdoctor.logs.line_values import NAMED_VALUE, PAIR, float_of, is_training, pairs, scale_settings, time_of
from dsdoctor.logs.rows import LinePattern
from dsdoctor.logs.shapes import STEP
from dsdoctor.logs.source import Source
from dsdoctor.logs.story import Place, Story
from dsdoctor.logs.timeline import Overflow
from dsdoctor.logs.tracebacks import Moment, TracebackReader, is_bare, is_ignored
from dsdoctor.logs.unwrap import Unwrapped, apart, plain, unwrap
from dsdoctor.logs.wrapped import Boxed
from dsdoctor.runs.facts import Failure

ATTENTION = 200
"""Lines looked at one by one after a line of a traceback or a config."""
MAX_OPEN = 2048
"""Ranks of which tracebacks, or configs, are read at the same time."""
_LINES_OF_A_BOX = 20
"""Lines looked at one by one after one in a box: a message may go on there."""
MAX_SEGMENT = 20_000
"""Characters of a segment that are looked at; what is longer is dumped data."""

_LOGGER = re.compile(r"\[\d{4}-\d\d-\d\d [\d:,]+\] \[[A-Z]+\] \[")
_LAUNCHER_TYPES = {"ChildFailedError", "CalledProcessError", "SignalException"}
_STARTS_RANKS = re.compile(r"Command '\[?'?(?:\S*/)?(?:deepspeed|torchrun|accelerate|mpirun|srun)\b")
"""A script that starts a launcher, and raises that it failed."""
_OF_CHILDREN = {"ProcessExitedException", "ProcessRaisedException"}
"""What `torch.multiprocessing.spawn` raises because one of its processes has failed."""


class LineReader:
    """Reads single lines of one source into a story. `line` is the number of the line that comes next."""

    def __init__(self, source: Source, story: Story) -> None:
        self._source = source
        self._story = story
        self.line = 1
        self.attention = 0
        self._time: float | None = None
        self._readers: dict[int | None, TracebackReader] = {}
        self._blocks: dict[int | None, ConfigBlock] = {}
        self._bar: tuple[int, int] = (0, 0)
        self._summary_rank: int | None = None
        self._dicts = 0
        self._boxed = Boxed()
        self._collected = Collected()

    @property
    def expects_more(self) -> bool:
        """True if an exception was read, which steps may yet show to be survived."""
        return bool(self._readers)

    def close(self) -> None:
        """The source has ended: whatever is open is complete."""
        for text, line in self._boxed.take():
            self._segment(text, line, grammar.ALL)
        for reader in self._readers.values():
            reader.interrupt()
            self._take(reader, keep=0)

    def read(self, text: str, rows: Sequence[LinePattern] = grammar.ALL) -> None:
        """Read one line, which may hold several segments; only with these rows of the grammar."""
        for segment in text.split("\r") if "\r" in text else (text,):
            if self._boxed.open or "│" in segment or "┃" in segment:
                self._boxed_segment(segment[:MAX_SEGMENT])
                continue
            for part in apart(segment[:MAX_SEGMENT]):
                self._segment(part, self.line, rows)

    def _boxed_segment(self, segment: str) -> None:
        for text, line in self._boxed.feed(plain(segment), self.line):
            for part in apart(text):
                self._segment(part, line, grammar.ALL)
        if self._boxed.open:
            self.attention = max(self.attention, _LINES_OF_A_BOX)

    def told_dicts(self, count: int) -> None:
        """So many dicts of the Trainer came, which have no number of the step."""
        self._dicts += count
        self._story.shown(self._dicts)

    def bar_at(self, done: int) -> None:
        """A bar of one epoch shows so many steps."""
        self._bar = (done, self._bar[1])
        self._story.done(self._bar[1] + done)

    def step_at(self, step: float) -> None:
        if math.isfinite(step):
            self._story.done(int(step))

    def _segment(self, segment: str, number: int, rows: Sequence[LinePattern]) -> None:
        if not (self._readers or self._blocks or segment.strip()):
            return
        self._time = time_of(segment) or self._time
        head = grammar.TRACEBACK in segment
        if head:
            self._collected.learn(segment)
        if head or self.attention > 0:
            segment = self._collected.without_prefix(segment)
        line = unwrap(segment)
        rank = self._source.rank if line.rank is None else line.rank
        if line.rank is not None:
            self._story.saw(line.rank)
        place = Place(self._source.name, number, rank, self._time, line.text or line.prefix, line.host)
        self._story.last = place if line.text.strip() else self._story.last
        matched = grammar.matches(line.text, rows)
        if any(row in grammar.PROGRESS for row, _ in matched):
            if place.rank in self._readers:
                self._readers[place.rank].interrupt()
        elif self._in_traceback(line, place):
            self.attention = ATTENTION
            matched = [(row, match) for row, match in matched if row.kind in grammar.ALSO_IN_TRACEBACKS]
        self._config(line, place)
        for row, match in matched:
            self._meaning(row, match, place)

    # --- tracebacks

    def _in_traceback(self, line: Unwrapped, place: Place) -> bool:
        reader = self._readers.get(place.rank)
        bare = is_bare(line) and not (reader is not None and reader.in_message)
        begins = grammar.TRACEBACK in line.text or is_ignored(line.text) or bare
        if reader is None:
            if not begins or len(self._readers) >= MAX_OPEN:
                return False
            reader = self._readers[place.rank] = TracebackReader(self._source.name, place.rank)
        elif not begins and not reader.busy:
            return False
        moment = Moment(place.line, self._story.step, self._time, self._story.progress.shown)
        consumed = reader.bare(line.text, moment) if bare else reader.feed(line.text, moment)
        self._take(reader, keep=1 if reader.busy else 0)
        return consumed

    def _take(self, reader: TracebackReader, *, keep: int) -> None:
        """Hand on the exceptions that are complete, but for the last one, which another may yet be chained to."""
        complete = reader.done[: max(0, len(reader.done) - keep)]
        del reader.done[: len(complete)]
        for raised in complete:
            if not _launchers(raised.failure):
                self._story.failure(raised.failure, raised.progress)

    # --- configs

    def _config(self, line: Unwrapped, place: Place) -> None:
        block = self._blocks.get(place.rank)
        if block is not None:
            self.attention = ATTENTION
            state = block.feed(line.text, place.line)
            if isinstance(state, Mapping):
                self._know(state, block.marks, place)
            if not isinstance(state, bool) or not state:
                del self._blocks[place.rank]
        elif line.text.rstrip()[-1:] == "{" and BEGINS.search(line.text) and len(self._blocks) < MAX_OPEN:
            self._blocks[place.rank] = ConfigBlock(place.line)
            self.attention = ATTENTION
        elif "{" in line.text and any(key in line.text for key in ONE_LINE_KEYS):
            found = parse(line.text[line.text.find("{") :])
            if found is not None:
                self._know(found, {}, place)

    def _know(self, config: Mapping[str, Any], marks: Mapping[str, int], place: Place) -> None:
        self._story.config = config
        fp16 = config.get("fp16")
        if isinstance(fp16, Mapping) and fp16.get("enabled") is True:
            where = Place(
                place.source, marks.get("fp16", place.line), place.rank, place.time, '"fp16": {"enabled": true}'
            )
            self._story.event("fp16-enabled", {}, where)

    # --- lines

    def _meaning(self, row: LinePattern, match: re.Match[str], place: Place) -> None:
        kind = row.kind
        if kind.startswith("overflow"):
            self._overflow(kind, match, place)
        elif row in grammar.PROGRESS:
            self._progress(kind, match, place)
        elif row in EXITS:
            self._exit(kind, match, place)
        elif kind == "started":
            self._started(place)
        else:
            fields = {name: value for name, value in match.groupdict().items() if value is not None}
            if "rank" in fields:
                place = replace(place, rank=int(fields["rank"]))
            self._learn(kind, fields)
            self._story.event(kind, fields, place)

    def _started(self, place: Place) -> None:
        """Steps are counted anew where the ranks are started again; a block is then chosen from anew, too."""
        if self._story.progress.started(place.source, place.line):
            self._dicts, self._bar = 0, (0, 0)
            self.attention = max(self.attention, 1)

    def _learn(self, kind: str, fields: dict[str, str]) -> None:
        settings = self._story.settings
        if kind in ("deepspeed-version", "torch-version"):
            for name, value in fields.items():
                self._story.versions.setdefault(name, value)
        elif kind == "fp16-flag":
            settings.setdefault("fp16.enabled", True)
        elif kind == "bf16-flag":
            settings.setdefault("bf16.enabled", True)
        elif kind == "stage-flag":
            settings.setdefault("zero_optimization.stage", int(next(iter(fields.values()))))
        elif kind == "scale-settings":
            settings.update(scale_settings(fields))

    def _overflow(self, kind: str, match: re.Match[str], place: Place) -> None:
        groups = match.groupdict()
        scale = float_of(groups.get("scale"))
        following = float_of(groups.get("next")) if groups.get("next") else scale
        if kind == "overflow-static" and scale == 1:
            scale = following = None
        told = Overflow(
            self._story.step if self._story.step is not None else 0,
            scale,
            following,
            place.line,
            place.source,
            place.text[:300],
            _LOGGER.search(place.text) is None,
        )
        named = groups.get("rank")
        self._story.tick()
        attempt = self._story.progress.attempt(place.source)
        self._story.scale.add((int(named) if named else place.rank, attempt), told)

    def _progress(self, kind: str, match: re.Match[str], place: Place) -> None:
        if kind == "bar":
            self._bar_moved(match)
        elif kind == "hf-dict":
            self.told_dicts(1)
            for pair in PAIR.finditer(match.group()):
                if pair["key"] == STEP:
                    self.step_at(float(pair["value"]))
            self._values(PAIR, match.group(), place)
        else:
            self._story.done(int(match["step"]))
            if kind in ("plain-step", "pipe-step"):
                self._values(NAMED_VALUE, place.text[match.start() :], place)
            elif kind == "megatron":
                self._values(NAMED_VALUE, place.text, place)

    def _values(self, pattern: re.Pattern[str], text: str, place: Place) -> None:
        for (start, end), name in pairs(pattern, text, 0):
            value = float_of(text[start:end])
            if name != STEP and value is not None:
                self._story.value(name, value, place)

    def _bar_moved(self, match: re.Match[str]) -> None:
        title = match["title"]
        if title and not is_training(title):
            return
        done, (before, base) = int(match["done"]), self._bar
        if done < before and title:
            base += before  # a new epoch has begun
        self._bar = (done, base)
        self._story.done(base + done)

    def _exit(self, kind: str, match: re.Match[str], place: Place) -> None:
        if kind == "exit-rank":
            self._summary_rank = int(match["rank"])
            self.attention = max(self.attention, 3)
            return
        told = match.groupdict().get("rank")
        rank = int(told) if told is not None else None
        if kind == "exit-word":
            self._story.exit(int(WORDS[match["word"]]), rank, place)
            return
        code = int(match["code"])
        named = self._summary_rank if rank is None and kind == "exit-code" else rank
        self._story.exit(code, named, place, by_launcher=code == -15)


def _launchers(failure: Failure) -> bool:
    """True for what a launcher raises because a rank has failed."""
    name = failure.type.rpartition(".")[2]
    if name not in _LAUNCHER_TYPES:
        return name in _OF_CHILDREN
    if not failure.frames:
        return failure.type.endswith("ChildFailedError")
    if name == "CalledProcessError" and _STARTS_RANKS.search(failure.message) is not None:
        return True
    return any(owner(frame) == "launcher" for frame in failure.frames)
