"""What kinds of lines a log repeats, told by their text without digits, and how they are read in bulk.

A log is long because it repeats a few kinds of lines. The key of a line is its text without digits and without the
cells of progress bars. What a key means is found out once it comes again. Lines that can mean nothing are then skipped,
and of lines that only tell values of a step, or repeat what is counted, a whole block is looked at together; every
other line is read by itself. A line may hold several segments, with carriage returns between them.
"""

from __future__ import annotations

import dataclasses
import re
from array import array
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from dsdoctor.logs import grammar
from dsdoctor.logs.configs import ONE_LINE_KEYS
from dsdoctor.logs.fields import Field, locate
from dsdoctor.logs.rows import NUMBER, LinePattern
from dsdoctor.logs.search import Search
from dsdoctor.logs.unwrap import unwrap

MAX_KEY = 1000
"""Bytes of a key that is remembered; what is longer is dumped data, each piece another one."""
MAX_KEYS = 20_000
_MANY = 500
"""So many new keys that may mean something are text which hardly repeats: only those are looked at that do."""

_ERASED = b"0123456789" + bytes(range(0x88, 0x90)) + b"\xe2\x96"
_NO_LETTERS = bytes(range(0x80)) + b"\xff" * 0x80
"""One byte that is printable stands for all that are no ASCII."""
_TO_LINES = bytes.maketrans(b"\r", b"\n")
_STRUCTURE = (grammar.TRACEBACK, *grammar.CHAINED, *grammar.IGNORED, "Error: ", *ONE_LINE_KEYS)
_DUMP = 65_536
_LONG = 8192
_VALUE = rb"(" + NUMBER.encode() + rb")"
_TOKEN = re.compile(
    r"(?P<free>(?<![\w.])[-+]?(?:\d[\d.]*(?:[eE][-+]?\d+)?|nan|NaN|inf|Infinity)(?!\w))|\d+|(?P<other>\xff+)"
)

DONE = re.compile(rb"%\|[^|\r]*\| *(\d+)/\d+ \[")
"""How many steps a progress bar shows done."""

STEP, RANK, SKIPPED, SCALE = "step", "rank", "skipped", "loss_scale"


def keys(data: bytes, *, by_lines: bool) -> list[bytes]:
    """The keys of all lines, or of all segments, of a block in order; an empty one behind a last line end."""
    found = data.translate(None if by_lines else _TO_LINES, _ERASED).split(b"\n")
    if len(data) > _LONG * len(found):  # there are dumps of data in it, whose beginnings tell enough
        found = [key if b"\r" in key else key[:_DUMP] for key in found]
    return found


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
    """The line tells values, mostly of a step, or repeats what is only counted.

    `pattern` finds the values, a group each: of the rank if `ranked`, then of the values by `names`; STEP among them is
    the step itself, SKIPPED a counter of skipped steps. `fields` says where they stand, the rank's under RANK. `bar`
    stands for progress bars in the same line, `led` is true if one of them comes before the values. `events` are the
    rows that are only counted.
    """

    pattern: re.Pattern[bytes]
    names: tuple[str, ...]
    ranked: bool
    fields: tuple[tuple[str, Field], ...] = ()
    bar: Bar | None = None
    led: bool = False
    events: tuple[LinePattern, ...] = ()

    @cached_property
    def numbered(self) -> bool:
        return STEP in self.names

    @cached_property
    def steps(self) -> bool:
        """True if the line itself says which step it is about."""
        return self.numbered or self.led

    @cached_property
    def counted(self) -> bool:
        """True for lines of the Trainer: they are counted, since most of them have no number."""
        return any(row.kind == "hf-dict" for row in self.rows)

    @cached_property
    def series(self) -> tuple[str, ...]:
        """The names of the series that it tells values of."""
        return tuple(name for name in self.names if name not in (STEP, SKIPPED))


Meaning = Meant | None
ANY = Meant(grammar.ALL)
"""What a line means that was not looked at: it is to be read."""


class Kinds:
    """Remembers what the keys mean, by number: 0 for nothing.

    `values` finds the values of a line, given a row of the grammar, its match and the text: pairs of a place, as start
    and end, and a name, or None if the row cannot be read in bulk. `is_training` says of a bar's title whether it is
    training that the bar shows.
    """

    def __init__(
        self,
        values: Callable[[LinePattern, re.Match[str], str], list[tuple[tuple[int, int], str]] | None],
        is_training: Callable[[str], bool],
    ) -> None:
        self._values = values
        self._is_training = is_training
        self._known: dict[bytes, int] = {}
        self._same: dict[object, int] = {}
        self.meanings: list[Meaning] = [None, ANY]

    def numbers(self, found: list[bytes], text: Callable[[int], bytes]) -> array[int]:
        """The numbers of what these lines mean, given their keys and a function for their texts."""
        try:
            return array("q", map(self._known.__getitem__, found))
        except KeyError:
            new = set(found).difference(self._known)
        if len(self._known) + len(new) > MAX_KEYS:
            self._forget()
            new = set(found)
        self._known.update(dict.fromkeys(new, 0))
        listed = list(new)
        passing = [key for key in listed if len(key) > MAX_KEY] if max(map(len, listed)) > MAX_KEY else []
        suspect = {listed[at] for at in _SEARCH.among(listed)}
        if suspect:
            places = {found[at]: at for at in range(len(found) - 1, -1, -1) if found[at] in suspect}
            once: list[bytes] = []
            if len(suspect) > _MANY:
                often = Counter(key for key in found if key in suspect)
                once = [key for key, count in often.items() if count == 1]
                meant = _EXACT.among([text(places[key]) for key in once])
                self._known.update((once[at], 1) for at in meant)
                passing.extend(once)
            for key in suspect.difference(once):
                self._known[key] = self._number(self._meaning(key, text(places[key])))
        numbers = array("q", map(self._known.__getitem__, found))
        for key in passing:
            self._known.pop(key, None)
        return numbers

    def _forget(self) -> None:
        self._known.clear()
        self._same.clear()
        del self.meanings[2:]

    def _number(self, meaning: Meaning) -> int:
        """The same number for all that mean the same."""
        if meaning is None:
            return 0
        key = (type(meaning), *(getattr(meaning, field.name) for field in dataclasses.fields(meaning)))
        if key not in self._same:
            self._same[key] = len(self.meanings)
            self.meanings.append(meaning)
        return self._same[key]

    def _meaning(self, key: bytes, raw: bytes) -> Meaning:
        if b"\r" not in raw:
            meaning = self._of_segment(key, raw)
        else:
            parts = (self._of_segment(part.translate(None, _ERASED), part) for part in raw.split(b"\r"))
            meaning = _together([part for part in parts if part is not None])
        if type(meaning) is not Step:
            return meaning
        if len(key) > MAX_KEY:
            return Meant(meaning.rows)
        match = meaning.pattern.search(raw)
        names = (RANK, *meaning.names) if meaning.ranked else meaning.names
        if match is None or (b"\r" in raw and not names):
            return Meant(meaning.rows)
        found = locate(raw, match.regs[1:], [name in (RANK, STEP, SKIPPED) for name in names])
        located = list(zip(names, found, strict=True))
        if any(field is None and name != STEP for name, field in located):
            return Meant(meaning.rows)
        return replace(meaning, fields=tuple((name, field) for name, field in located if field is not None))

    def _of_segment(self, key: bytes, raw: bytes) -> Meaning:
        rows, sure, digits = _candidates(key)
        if not sure and not any(literal in raw for literal in digits):
            return Maybe(rows, digits) if digits else None
        text = raw.decode("latin-1")
        line = unwrap(raw.decode("utf-8", "replace"))
        matched = grammar.matches(line.text, rows)
        if any(words in text for words in _STRUCTURE) or raw.endswith(b"{"):
            return Meant(rows)
        bars = [match["title"] for row, match in matched if row.kind == "bar"]
        if bars and bars[0] and not self._is_training(bars[0]):
            return None if len(matched) == 1 else Meant(rows)
        bar = Bar(rows, bool(bars[0])) if bars else None
        if bar is not None and len(matched) == 1:
            return bar
        return (self._step(raw, rows, bar) if matched else None) or Meant(rows)

    def _step(self, raw: bytes, rows: tuple[LinePattern, ...], bar: Bar | None) -> Step | None:
        """How segments like this one are read in bulk; None if that is not certain."""
        text = raw.translate(_NO_LETTERS).decode("latin-1")
        line = unwrap(text)
        if line.prefix + line.text != text:
            return None
        before = len(line.prefix)
        matched = grammar.matches(line.text, rows)
        roles: dict[int, tuple[int, str]] = {}
        events = []
        for row, match in matched:
            told = self._values(row, match, line.text)
            if told is None:
                return None
            events += [row] if row.kind in grammar.ONLY_COUNTED else []
            for (start, end), name in told:
                role = (before + end, name)
                if roles.setdefault(before + start, role) != role:
                    return None
        source, names = _pattern(text, roles, line.rank_at)
        pattern = re.compile(source)
        if pattern.fullmatch(raw) is None or len(set(names)) < len(names):
            return None
        return Step(rows, pattern, names, line.rank_at is not None, bar=bar, led=bar is not None, events=tuple(events))


def _together(parts: list[Meant]) -> Meaning:
    """What the segments of a line mean together."""
    rows = _in_order(row for part in parts for row in part.rows)
    bars = [part for part in parts if type(part) is Bar]
    steps = [part for part in parts if type(part) is Step]
    if len(bars) + len(steps) < len(parts) or len(steps) > 1:
        return Meant(rows)
    bars += [step.bar for step in steps if step.bar is not None]
    bar = Bar(rows, any(part.titled for part in bars)) if bars else None
    return replace(steps[0], rows=rows, bar=bar, led=parts[0] in bars or steps[0].led) if steps else bar


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
            plain = rb"[-+.\w]+" if token["free"] else rb"[\x80-\xff]*" if token["other"] else rb"\d+"
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


_OPENING = (b"{\n", b"{\r")
"""The end of a line after which a config may follow."""
_SEARCH = Search((*_SURE, *_WITH_DIGITS, *_OPENING))
_EXACT = Search((*LITERALS, *_OPENING))


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
