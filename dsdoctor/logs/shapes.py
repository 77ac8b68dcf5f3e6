"""What kinds of lines a log repeats, told by their text without digits, and how steps are read out of them in bulk.

A log is long because it repeats a few kinds of lines. The key of a line is its text without digits and without the
cells of progress bars. What a key means is found out once. Lines that can mean nothing are then skipped, and the values
of a repeated step are read with one regular expression for a whole block; every other line is read by itself. A line
may hold several segments, with carriage returns between them; where nearly all are such, the segments stand for lines.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar, cast

from dsdoctor.logs import grammar
from dsdoctor.logs.fields import Field, locate
from dsdoctor.logs.grammar import LinePattern
from dsdoctor.logs.search import Search
from dsdoctor.logs.unwrap import unwrap

MAX_KEY = 1000
"""Bytes of a key that is remembered; what is longer is dumped data, each piece another one."""
MAX_KEYS = 20_000

_ERASED = b"0123456789" + bytes(range(0x88, 0x90)) + b"\xe2\x96"
_TO_LINES = bytes.maketrans(b"\r", b"\n")
_STRUCTURE = (grammar.TRACEBACK, *grammar.CHAINED, *grammar.IGNORED, "Error: ", "train_batch_size")
_SAMPLE = 8192
_DUMP = 65_536
_SEGMENTS_OF_A_LINE = 8
_VALUE = rb"(" + grammar.NUMBER.encode() + rb")"
_TOKEN = re.compile(r"(?P<free>(?<![\w.])[-+]?(?:\d[\d.]*(?:[eE][-+]?\d+)?|nan|NaN|inf|Infinity)(?!\w))|\d+")


STEP, RANK = "step", "rank"


def by_lines(block: bytes) -> bool:
    """True if a block is better taken apart at line feeds only: its lines hold few segments, always the same ones."""
    sample = block[:_SAMPLE]
    return sample.count(b"\r") <= _SEGMENTS_OF_A_LINE * sample.count(b"\n")


def split(block: bytes, *, by_lines: bool) -> tuple[list[bytes], list[bytes]]:
    """The lines (or segments) of a block and their keys, in order."""
    table = None if by_lines else _TO_LINES
    texts = block.split(b"\n") if by_lines else block.translate(_TO_LINES).split(b"\n")
    found = block.translate(table, _ERASED).split(b"\n")
    if len(block) > _SAMPLE * len(texts):  # there are dumps of data in it, whose beginnings tell enough
        found = [key if b"\r" in key else key[:_DUMP] for key in found]
    return texts, found


@dataclass(frozen=True, eq=False)
class Meant:
    """The line means something: it is to be read by itself, with these rows of the grammar."""

    rows: tuple[LinePattern, ...]


@dataclass(frozen=True, eq=False)
class Maybe(Meant):
    """The line means something if one of these literals, which have digits, stands in it."""

    literals: tuple[bytes, ...]


@dataclass(frozen=True, eq=False)
class Bar(Meant):
    """The line holds progress bars of training and nothing else; those with a title start anew each epoch."""

    titled: bool


@dataclass(frozen=True, eq=False)
class Step(Meant):
    """The line tells values of a step; `numbered` if one of its names is STEP, the step itself.

    `pattern` finds them, a group each: of the rank if `ranked`, then of the values by `names`. `fields` says where they
    stand, the rank's under RANK. `bar` stands for progress bars in the same line, `led` is true if one of them comes
    before the values.
    """

    pattern: re.Pattern[bytes]
    names: tuple[str, ...]
    ranked: bool
    fields: tuple[tuple[str, Field], ...] = ()
    bar: Bar | None = None
    led: bool = False

    @cached_property
    def numbered(self) -> bool:
        return STEP in self.names

    @cached_property
    def counted(self) -> bool:
        """True for lines of the Trainer: they are counted, since most of them have no number."""
        return any(row.kind == "hf-dict" for row in self.rows)


Meaning = Meant | None
_M = TypeVar("_M", bound=Meant)


class Kinds:
    """Remembers what the keys mean.

    `values` are the patterns of the values in each kind of lines about steps, `names` says what their keys stand for,
    `is_training` of a bar's title whether it is training that the bar shows.
    """

    def __init__(
        self, values: Mapping[str, re.Pattern[str]], names: Mapping[str, str], is_training: Callable[[str], bool]
    ) -> None:
        self._values = values
        self._names = names
        self._is_training = is_training
        self._known: dict[bytes, Meaning] = {}
        self._same: dict[object, Meant] = {}

    def meanings(self, found: Sequence[bytes], texts: Sequence[bytes]) -> list[Meaning]:
        """What each of these lines means, given their keys and texts."""
        distinct = set(found)
        new = distinct.difference(self._known)
        if not new:
            return list(map(self._known.__getitem__, found))
        suspect = _with_literals(new)
        if len(self._known) + len(new) > MAX_KEYS:
            self._known.clear()
            new = distinct
            suspect = _with_literals(new)
        known = self._known
        known.update(dict.fromkeys(new))
        for key in suspect:
            known[key] = self._meaning(key, texts[found.index(key)])
        answer = list(map(known.__getitem__, found))
        for key in new:
            if len(key) > MAX_KEY:
                del known[key]
        return answer

    def _meaning(self, key: bytes, raw: bytes) -> Meaning:
        if b"\r" not in raw:
            meaning = self._of_segment(key, raw)
        else:
            parts = (self._of_segment(part.translate(None, _ERASED), part) for part in raw.split(b"\r"))
            meaning = _together([part for part in parts if part is not None])
        if type(meaning) is Step:
            match = meaning.pattern.search(raw)
            names = (RANK, *meaning.names) if meaning.ranked else meaning.names
            spans = zip(names, match.regs[1:], strict=True) if match is not None else ()
            located = [(name, locate(raw, *span)) for name, span in spans if name != STEP] or [("", None)]
            fields = [(name, field) for name, field in located if field is not None]
            bar = None if meaning.bar is None else self._one(meaning.bar)
            whole = replace(meaning, fields=tuple(fields), bar=bar)
            meaning = whole if len(fields) == len(located) else Meant(meaning.rows)
        return None if meaning is None else self._one(meaning)

    def _one(self, meaning: _M) -> _M:
        """The same object for all that mean the same, so that lines can be sorted by it."""
        key = (type(meaning), *(getattr(meaning, field.name) for field in dataclasses.fields(meaning)))
        return cast(_M, self._same.setdefault(key, meaning))

    def _of_segment(self, key: bytes, raw: bytes) -> Meaning:
        rows, sure, digits = _candidates(key)
        if not sure and not any(literal in raw for literal in digits):
            return Maybe(rows, digits) if digits else None
        text = raw.decode("latin-1")
        line = unwrap(raw.decode("utf-8", "replace"))
        matched = [(row.kind, match) for row in rows if (match := row.pattern.search(line.text)) is not None]
        kinds = {kind for kind, _ in matched}
        if any(words in text for words in _STRUCTURE) or raw.endswith(b"{"):
            return Meant(rows)
        if kinds == {"bar"}:
            title = matched[0][1]["title"]
            return Bar(rows, bool(title)) if not title or self._is_training(title) else None
        only = next(iter(kinds)) if len(matched) == 1 else ""
        return (self._step(text, only, rows) if only in self._values else None) or Meant(rows)

    def _step(self, text: str, kind: str, rows: tuple[LinePattern, ...]) -> Step | None:
        """How segments like this one are read in bulk; None if that is not certain."""
        line = unwrap(text)
        match = next((m for row in rows if row.kind == kind and (m := row.pattern.search(line.text))), None)
        if line.prefix + line.text != text or match is None:
            return None
        before = len(line.prefix)
        roles: dict[int, tuple[int, str]] = {}
        if STEP in match.re.groupindex:
            roles[before + match.start(STEP)] = (before + match.end(STEP), STEP)
        for pair in self._values[kind].finditer(text, before):
            name = self._names.get(pair["key"].lower())
            if name is not None and name not in {known for _, known in roles.values()}:
                roles[pair.start("value")] = (pair.end("value"), name)
        source, names = _pattern(text, roles, line.rank_at)
        pattern = re.compile(source)
        if pattern.fullmatch(text.encode("latin-1")) is None or not set(names) - {STEP}:
            return None
        return Step(rows, pattern, names, line.rank_at is not None)


def _together(parts: list[Meant]) -> Meaning:
    """What the segments of a line mean together."""
    rows = _in_order(row for part in parts for row in part.rows)
    bars = [part for part in parts if type(part) is Bar]
    steps = [part for part in parts if type(part) is Step]
    if len(bars) + len(steps) < len(parts) or len(steps) > 1:
        return Meant(rows)
    bar = Bar(rows, any(part.titled for part in bars)) if bars else None
    return replace(steps[0], rows=rows, bar=bar, led=parts[0] in bars) if steps else bar


def _pattern(text: str, roles: dict[int, tuple[int, str]], rank_at: int | None) -> tuple[bytes, tuple[str, ...]]:
    """A text as regular expression that holds for other numbers too, and the names of its values in order."""
    pieces: list[bytes] = []
    names: list[str] = []
    position = 0
    while position < len(text):
        token = _TOKEN.match(text, position)
        if position in roles:
            end, name = roles[position]
            names.append(name)
            pieces.append(_VALUE)
        elif token is None:
            end = position + 1
            pieces.append(re.escape(text[position].encode("latin-1")))
        else:
            end = token.end()
            plain = rb"[-+.\w]+" if token["free"] else rb"\d+"
            pieces.append(rb"(\d+)" if position == rank_at else plain)
        position = end
    return b"".join(pieces), tuple(names)


LITERALS = tuple(text.encode() for text in dict.fromkeys((*grammar.BY_LITERAL, *_STRUCTURE)))
"""What is searched for: a line with none of them means nothing."""

_SURE: dict[bytes, tuple[LinePattern, ...]] = {}
_WITH_DIGITS: dict[bytes, list[tuple[bytes, tuple[LinePattern, ...]]]] = {}
for _literal, _rows in (*grammar.BY_LITERAL.items(), *((text, ()) for text in _STRUCTURE)):
    _raw = _literal.encode()
    _short = _raw.translate(None, _ERASED)
    if _short == _raw:
        _SURE[_raw] = _rows
    else:
        _WITH_DIGITS.setdefault(_short, []).append((_raw, _rows))


_SEARCH = Search((*_SURE, *_WITH_DIGITS))


def _candidates(key: bytes) -> tuple[tuple[LinePattern, ...], bool, tuple[bytes, ...]]:
    """The rows that a segment of this key may match, whether a literal surely stands in it, and which else may."""
    sure = [literal for literal in _SURE if literal in key]
    maybe = [pair for short, pairs in _WITH_DIGITS.items() if short in key for pair in pairs]
    rows = _in_order(row for found in (*map(_SURE.__getitem__, sure), *(more for _, more in maybe)) for row in found)
    return rows, bool(sure) or key.endswith(b"{"), tuple(literal for literal, _ in maybe)


def _in_order(rows: Iterable[LinePattern]) -> tuple[LinePattern, ...]:
    """The rows, each once, as the grammar orders them."""
    distinct = set(rows)
    return tuple(row for row in grammar.ALL if row in distinct)


def _with_literals(found: Iterable[bytes]) -> list[bytes]:
    """Those of the keys in which a literal of the grammar may stand."""
    listed = list(found)
    together = b"\n".join(listed)
    present = _SEARCH.present(together)
    return [key for key in listed if key.endswith(b"{") or any(literal in key for literal in present)]
