"""One pass over one source: find the lines that mean something, read them, and tell the story what they say.

A block is taken apart into segments, of which those are decoded and read that mean something by their kind
(`dsdoctor.logs.shapes`); of the steps of training only those that a series keeps (`dsdoctor.logs.bulk`). While a
traceback or a config is open, every segment is read. Memory does not grow with the log.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

from dsdoctor.logs import grammar
from dsdoctor.logs.bulk import DONE, Choice, choose
from dsdoctor.logs.configs import BEGINS, ConfigBlock, parse
from dsdoctor.logs.grammar import LinePattern
from dsdoctor.logs.grammar_ranks import WORDS
from dsdoctor.logs.shapes import STEP, Kinds, Meaning, Step, by_lines, split
from dsdoctor.logs.source import Source
from dsdoctor.logs.story import Place, Story
from dsdoctor.logs.timeline import Overflow
from dsdoctor.logs.tracebacks import Moment, TracebackReader, is_bare
from dsdoctor.logs.unwrap import Unwrapped, apart, unwrap
from dsdoctor.logs.wrapped import joined, width
from dsdoctor.runs.facts import Failure

ATTENTION = 200
"""Lines looked at one by one after a line of a traceback or a config."""
_PASTED = 1 << 20
"""Bytes of a log that may have been pasted from a terminal."""
MAX_SEGMENT = 20_000
"""Characters of a segment that are looked at; what is longer is dumped data."""

_TIME = re.compile(r"(?P<date>\d{4}-\d\d-\d\d)[T ](?P<clock>\d\d:\d\d:\d\d)(?:[.,](?P<part>\d+))?")
_GLOG = re.compile(r"\b[IWEF](?P<month>\d\d)(?P<day>\d\d) (?P<clock>\d\d:\d\d:\d\d)\.(?P<part>\d+)")
_LOGGER = re.compile(r"\[\d{4}-\d\d-\d\d [\d:,]+\] \[[A-Z]+\] \[")
_PAIR = re.compile(rf"['\"](?P<key>loss|grad_norm|learning_rate|step)['\"]: ['\"]?(?P<value>{grammar.NUMBER})\b")
_NAMED_VALUE = re.compile(
    rf"(?i){grammar.NOT_OF_A_TEST}\b(?P<key>lm loss|loss scale|loss|grad[_ ]?norm|learning[_ ]rate|lr)\b['\"]?[ :=|]*"
    rf"(?P<value>{grammar.NUMBER})\b"
)
_SERIES = {
    "lm loss": "loss",
    "loss": "loss",
    "grad norm": "grad_norm",
    "grad_norm": "grad_norm",
    "gradnorm": "grad_norm",
}
_SERIES |= {"learning rate": "lr", "learning_rate": "lr", "lr": "lr"}
_VALUES = {"hf-dict": _PAIR, **dict.fromkeys(("megatron", "plain-step", "pipe-step"), _NAMED_VALUE)}
_TRAINING_BAR = re.compile(r"(?i)^(?!.*(?:tokeniz|dataset|\bsplit\b|loading)).*\b(?:epoch|train\w*|steps?|iter\w*)\b")
_LAUNCHER_FILE = re.compile(
    r"torch[/\\]distributed[/\\](?:run\.py|launch|elastic)|deepspeed[/\\]launcher|accelerate[/\\]commands"
)
_LAUNCHER_TYPES = {"ChildFailedError", "CalledProcessError", "SignalException"}


class _Place:
    """Where in a block the reading is: before which of its lines, or of its segments if they stand for lines."""

    def __init__(self, block: bytes) -> None:
        self._by_lines = by_lines(block)
        if not self._by_lines and b"\r\n" in block:
            block = block.replace(b"\r\n", b"\n")
        self.texts, self.keys = split(block, by_lines=self._by_lines)
        self._last = len(self.texts) - 1
        if not self.texts[-1]:
            self.texts.pop()
        self.index = 0
        self._block = block
        self._offset = 0

    def lines_to(self, index: int) -> int:
        """Go on to this index; how many lines ended on the way."""
        before, self.index = self.index, index
        if self._by_lines:
            return min(index, self._last) - before
        start = self._offset
        self._offset += sum(map(len, self.texts[before:index])) + index - before
        return self._block.count(b"\n", start, self._offset)


class Scanner:
    """Reads the blocks of one source into a story."""

    def __init__(self, source: Source, story: Story) -> None:
        self._source = source
        self._story = story
        self._line = 1
        self._unfinished = False
        self._width: int | None = None
        self._attention = 0
        self._time: float | None = None
        self._readers: dict[int | None, TracebackReader] = {}
        self._blocks: dict[int | None, ConfigBlock] = {}
        self._bar: tuple[int, int] = (0, 0)
        self._summary_rank: int | None = None
        self._dicts = 0
        self.kinds = Kinds(_VALUES, _SERIES | {STEP: STEP}, lambda title: _TRAINING_BAR.search(title) is not None)

    def scan(self, blocks: Iterable[bytes]) -> None:
        """Read all blocks, then close what is still open. Exceptions of `blocks` pass through, after the closing."""
        try:
            for block in blocks:
                self.feed(block)
        finally:
            self.close()

    def feed(self, block: bytes) -> None:
        """Read the next block of the source."""
        self._story.source = self._source.name
        self._unfinished = not block.endswith(b"\n")
        if self._width is None:
            self._width = (len(block) <= _PASTED and width(_lines(block), _tells)) or 0
        if self._width:
            self._feed_broken(block, self._width)
            return
        place = _Place(block)
        while place.index < len(place.texts):
            if self._attention > 0:
                self._read(place)
            else:
                self._regular(place)

    def _feed_broken(self, block: bytes, width: int) -> None:
        """Read all lines of a log that was pasted from a terminal, put together as they were before it broke them."""
        for text, count in joined(_lines(block), width):
            self._segments(text, None)
            self._line += count
        self._line -= self._unfinished

    def close(self) -> None:
        """The source has ended: whatever is open is complete."""
        self._story.source = self._source.name
        for reader in self._readers.values():
            reader.interrupt()
            self._take(reader, keep=0)
        self._story.lines += self._line - 1 + self._unfinished
        if self._unfinished:
            self._story.unfinished.append((self._source.name, self._line))

    def _read(self, place: _Place, rows: Sequence[LinePattern] | None = None) -> None:
        """Read one line, and go on behind it."""
        self._segments(place.texts[place.index].rstrip(b"\r").decode("utf-8", "replace"), rows)
        lines = place.lines_to(place.index + 1)
        self._line += lines
        self._attention -= lines

    def _segments(self, text: str, rows: Sequence[LinePattern] | None) -> None:
        for segment in text.split("\r") if "\r" in text else (text,):
            for part in apart(segment[:MAX_SEGMENT]):
                self._segment(part, rows)

    def _regular(self, place: _Place) -> None:
        """Read what means something, up to the end of the block or a segment from which on all are to be read."""
        start, texts = place.index, place.texts
        meanings = self.kinds.meanings(place.keys[start : len(texts)], texts[start:])
        choice = choose(meanings, texts[start:], self._story.series, whole_head=bool(self._readers))
        self._story.ranks.update(choice.ranks)
        done = 0
        for index in sorted(choice.whole | choice.glanced):
            self._passed(choice, done, index)
            done = index + 1
            self._line += place.lines_to(start + index)
            meaning = meanings[index]
            if index in choice.glanced:
                self._glance(place, meaning)
                continue
            self._read(place, meaning.rows if meaning is not None else None)
            if self._attention > 0:
                return
        self._passed(choice, done, len(meanings))
        self._line += place.lines_to(len(texts))

    def _glance(self, place: _Place, meaning: Meaning) -> None:
        """Take the steps of the bars in a line, and the values of its step, without reading it as a whole."""
        for segment in place.texts[place.index].split(b"\r"):
            for done in DONE.findall(segment):
                self._bar = (int(done), self._bar[1])
                self._story.progress(self._bar[1] + int(done))
            if isinstance(meaning, Step) and (match := meaning.pattern.search(segment)) is not None:
                self._tell(meaning, match.groups(), segment)

    def _tell(self, step: Step, groups: tuple[bytes, ...], segment: bytes) -> None:
        self._count(step, 1)
        rank = int(groups[0]) if step.ranked else self._source.rank
        if rank is not None:
            self._story.ranks.add(rank)
        told = dict(zip(step.names, map(float, groups[step.ranked :]), strict=True))
        if step.numbered:
            self._progressed(told.pop(STEP))
        for name, number in told.items():
            builder = self._story.builder(name)
            builder.add(self._story.step, number, self._line, self._source.name, rank, segment)

    def _progressed(self, step: float) -> None:
        if math.isfinite(step):
            self._story.progress(int(step))

    def _count(self, step: Step, count: int) -> None:
        """So many lines told values; those of the Trainer have no number of the step."""
        if step.counted:
            self._dicts += count
            self._story.shown(self._dicts)

    def _passed(self, choice: Choice, start: int, end: int) -> None:
        for step, count in choice.passed(start, end):
            self._count(step, count)
            for name in step.names:
                if name != STEP:
                    self._story.builder(name).passed(count)

    def _segment(self, segment: str, rows: Sequence[LinePattern] | None) -> None:
        line = unwrap(segment)
        rank = self._source.rank if line.rank is None else line.rank
        if rank is not None:
            self._story.ranks.add(rank)
        self._time = _time(segment) or self._time
        place = Place(self._source.name, self._line, rank, self._time, line.text or line.prefix)
        self._story.last = place if line.text.strip() else self._story.last
        matched = _matches(line.text, grammar.ALL if rows is None else rows)
        if any(row in grammar.PROGRESS for row, _ in matched):
            if place.rank in self._readers:
                self._readers[place.rank].interrupt()
        elif self._in_traceback(line, place):
            self._attention = ATTENTION
            matched = [(row, match) for row, match in matched if row.kind in grammar.ALSO_IN_TRACEBACKS]
        self._config(line, place)
        for row, match in matched:
            self._meaning(row, match, place)

    # --- tracebacks

    def _in_traceback(self, line: Unwrapped, place: Place) -> bool:
        reader = self._readers.get(place.rank)
        bare = is_bare(line) and not (reader is not None and reader.in_message)
        begins = grammar.TRACEBACK in line.text or line.text.startswith(grammar.IGNORED) or bare
        if reader is None:
            if not begins:
                return False
            reader = self._readers[place.rank] = TracebackReader(self._source.name, place.rank)
        elif not begins and not reader.busy:
            return False
        moment = Moment(place.line, self._story.step, self._time, self._story.steps_shown)
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
            self._attention = ATTENTION
            state = block.feed(line.text, place.line)
            if isinstance(state, Mapping):
                self._know(state, block.marks, place)
            if not isinstance(state, bool) or not state:
                del self._blocks[place.rank]
        elif line.text.rstrip()[-1:] == "{" and BEGINS.search(line.text):
            self._blocks[place.rank] = ConfigBlock(place.line)
            self._attention = ATTENTION
        elif "train_batch_size" in line.text and "{" in line.text:
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
        elif row in grammar.EXITS:
            self._exit(kind, match, place)
        else:
            fields = {name: value for name, value in match.groupdict().items() if value is not None}
            if "rank" in fields:
                place = replace(place, rank=int(fields["rank"]))
            self._learn(kind, fields)
            self._story.event(kind, fields, place)

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

    def _overflow(self, kind: str, match: re.Match[str], place: Place) -> None:
        groups = match.groupdict()
        scale = _float(groups.get("scale"))
        following = _float(groups.get("next")) if groups.get("next") else scale
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
        self._story.scale.add(int(named) if named else place.rank, told)

    def _progress(self, kind: str, match: re.Match[str], place: Place) -> None:
        if kind == "bar":
            self._bar_moved(match)
        elif kind == "hf-dict":
            self._dicts += 1
            self._story.shown(self._dicts)
            for pair in _PAIR.finditer(match.group()):
                if pair["key"] == STEP:
                    self._progressed(float(pair["value"]))
            self._values(_PAIR, match.group(), place)
        else:
            self._story.progress(int(match["step"]))
            if kind in ("plain-step", "pipe-step"):
                self._values(_NAMED_VALUE, place.text[match.start() :], place)
            elif kind == "megatron":
                self._values(_NAMED_VALUE, place.text, place)

    def _values(self, pattern: re.Pattern[str], text: str, place: Place) -> None:
        seen: set[str] = set()
        for pair in pattern.finditer(text):
            name = _SERIES.get(pair["key"].lower())
            value = _float(pair["value"])
            if name is not None and name not in seen and value is not None:
                seen.add(name)
                self._story.value(name, value, place)

    def _bar_moved(self, match: re.Match[str]) -> None:
        title = match["title"]
        if title and not _TRAINING_BAR.search(title):
            return
        done, (before, base) = int(match["done"]), self._bar
        if done < before and title:
            base += before  # a new epoch has begun
        self._bar = (done, base)
        self._story.progress(base + done)

    def _exit(self, kind: str, match: re.Match[str], place: Place) -> None:
        if kind == "exit-rank":
            self._summary_rank = int(match["rank"])
            self._attention = max(self._attention, 3)
            return
        told = match.groupdict().get("rank")
        rank = int(told) if told is not None else None
        if kind == "exit-word":
            self._story.exit(int(WORDS[match["word"]]), rank, place)
            return
        code = int(match["code"])
        named = self._summary_rank if rank is None and kind == "exit-code" else rank
        self._story.exit(code, named, place, by_launcher=code == -15)


def _tells(text: str) -> bool:
    """True for a line about an overflow or the values of a step."""
    return any(row.pattern.search(text) for row in grammar.OVERFLOWS) or _PAIR.search(text) is not None


def _lines(block: bytes) -> list[str]:
    return [line.rstrip("\r") for line in block.decode("utf-8", "replace").removesuffix("\n").split("\n")]


def _matches(text: str, rows: Iterable[LinePattern]) -> list[tuple[LinePattern, re.Match[str]]]:
    """What the line means, by all of these rows that match it, from left to right."""
    likely = (row for row in rows if any(literal in text for literal in row.literals))
    matched = [(row, match) for row in likely if (match := row.pattern.search(text)) is not None]
    return sorted(matched, key=lambda pair: pair[1].start()) if len(matched) > 1 else matched


def _launchers(failure: Failure) -> bool:
    """True for what a launcher raises because a rank has failed."""
    if failure.type.rpartition(".")[2] not in _LAUNCHER_TYPES:
        return False
    return any(_LAUNCHER_FILE.search(frame.file) for frame in failure.frames)


def _time(text: str) -> float | None:
    """Seconds since the epoch, taken as UTC; only differences matter."""
    match = _TIME.search(text, 0, 120)
    try:
        if match is not None:
            base = datetime.fromisoformat(f"{match['date']}T{match['clock']}").replace(tzinfo=timezone.utc)
            return base.timestamp() + float(f"0.{match['part'] or 0}")
        match = _GLOG.search(text, 0, 120)
        if match is not None:
            stamp = f"{datetime.now(timezone.utc).year}-{match['month']}-{match['day']}T{match['clock']}"
            return datetime.fromisoformat(stamp).replace(tzinfo=timezone.utc).timestamp() + float(f"0.{match['part']}")
    except ValueError:
        return None
    return None


def _float(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None
