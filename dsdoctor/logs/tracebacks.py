"""Exceptions out of the tracebacks in a log, one reader for each stream of lines (a file, or a rank's prefix in it).

Tracebacks of several ranks may be interleaved in one stream without any prefix. Then several are open at once and share
their frames; each exception line ends one of them.

People paste the end of a traceback, so one may also begin with a line of its middle, or be the last line alone.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from itertools import pairwise

from dsdoctor.logs import grammar
from dsdoctor.logs.unwrap import Unwrapped
from dsdoctor.runs.facts import Failure, Frame

MAX_MESSAGE_LINES = 60
MAX_FRAMES = 400
_RICH_WIDTH = 80
"""Columns that rich writes messages in where there is no terminal; its boxes have 100 of their own."""

_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+)(?:, in (?P<function>.+?))?\s*$')
_RICH_FRAME = re.compile(r"^\s*(?P<file>[\w./\\~-]+\.py):(?P<line>\d+) in (?P<function>[\w<>.]+)\s*$")
_IPYTHON_FRAME = re.compile(r"^File (?P<file>[^\s:]+):(?P<line>\d+), in (?P<function>[\w.<>]+)\(")
_IPYTHON_HEAD = re.compile(r"^(?P<type>\w+) {2,}Traceback ")
_RICH_CODE = re.compile(r"^\s*❱\s*\d+\s*[│|]?\s*(?P<code>.*)$")
_REPEATED = re.compile(r"^\s*\[Previous line repeated \d+ more times?\]")
_CARETS = re.compile(r"^\s*[\^~]+\s*$")
_NAMED = re.compile(r"^(?P<type>(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?:\([\w.]+\))?)(?:: (?P<message>.*)|:?\s*)$")
_LIKELY = re.compile(r"(?:Error|Exception|Exit|Interrupt|Warning|Timeout|Failure|Fault|Empty|Full|Iteration)\)?$|\.")
_FIGURE = re.compile(r"^[-+\d.,\s%e/]+$")
_IGNORED = re.compile(r"[\]|>:-]\sException ignored (?:in|on)\b")
_RAY = re.compile(r"RayTaskError\((?P<type>\w+)\)$")
_BARE = re.compile(r"^(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception): ")
_FOREIGN = re.compile(
    r"^\s*$|^\[?\d{4}-\d\d-\d\d|^[WEIF]\d{4} \d\d:|^\s*\d+%\||^\{'|^={10,}|^!{10,}|^\[[A-Z]+\|\w|^\S+:\d+:\d+ \["
)


@dataclass(frozen=True)
class Moment:
    """Where in its source and in training a line stands. `progress` counts the steps that the log has shown."""

    line: int
    step: int | None
    time: float | None
    progress: int


@dataclass(frozen=True)
class Raised:
    """An exception, and how many steps of training the log had shown when it came."""

    failure: Failure
    progress: int


@dataclass
class _Open:
    """The traceback(s) being read on a stream.

    `headers` counts them, 0 where the head of one is not in the log. `announced` is the type that IPython prints in
    front of the head. `box` is how wide a box is that rich draws around it, 0 without one.
    """

    ignored: bool
    frames: list[Frame] = field(default_factory=list)
    headers: int = 1
    chain: tuple[Failure, ...] = ()
    announced: str = ""
    box: int = 0


def is_bare(line: Unwrapped) -> bool:
    """True for a line of a traceback that means one without its head: a frame, or the last line (`Type: message`)."""
    frame = _FRAME.match(line.text)
    return _BARE.match(line.text) is not None or (frame is not None and frame["function"] is not None)


def is_ignored(text: str) -> bool:
    """True for Python's word that the exception below ends nothing, also behind a prefix that is not known."""
    return text.startswith(grammar.IGNORED) or _IGNORED.search(text) is not None


class TracebackReader:
    """Collects the exceptions of one stream. Feed it every line from the header of a traceback on while `busy`."""

    def __init__(self, source: str, rank: int | None) -> None:
        self._source = source
        self._rank = rank
        self._open: _Open | None = None
        self._last: Raised | None = None
        self._message: list[tuple[str, int]] = []
        self._fenced = False
        """The log was pasted into a text: what follows the end of the code block is no message."""
        self._box = 0
        self._written = ""
        self._ignored_next = False
        self._after_code = False
        self._pending_chain = False
        self.patience = 0
        self.done: list[Raised] = []

    @property
    def busy(self) -> bool:
        """True while lines of this stream belong, or may belong, to a traceback."""
        return self.patience > 0

    @property
    def in_message(self) -> bool:
        """True while the lines of an exception's message are read."""
        return self._last is not None

    def feed(self, text: str, at: Moment) -> bool:
        """Read one line; True if it was a part of a traceback."""
        self.patience -= 1
        if grammar.TRACEBACK in text:
            self._header(text)
            return True
        if is_ignored(text):
            self._close_message()
            self._ignored_next = True
            self.patience = 3
            return True
        if any(text.lstrip().startswith(words) for words in grammar.CHAINED):
            self._close_message()
            self._pending_chain = bool(self.done)
            self.patience = 6
            return True
        if self._open is not None:
            return self._inside(text, at)
        return self._in_message(text, at)

    def bare(self, text: str, at: Moment) -> bool:
        """Read such a line of a traceback whose head may not be in the log. True: it always is a part of one."""
        if self._open is None:
            self._close_message()
            self._open = _Open(ignored=self._ignored_next, headers=0)
            self._ignored_next = False
            self.patience = MAX_FRAMES
        named = _NAMED.match(text.rstrip())
        if named is not None:
            self._raised(named, at)
        else:
            self._inside(text, at)
        return True

    def interrupt(self) -> None:
        """Something else was printed, or the stream has ended: a message that was being read is complete."""
        self._close_message()

    def _header(self, text: str) -> None:
        self._close_message()
        if self._open is not None and self._open.headers:
            self._open.headers += 1
        else:
            chain: tuple[Failure, ...] = ()
            if self._pending_chain and self.done:
                before = self.done.pop().failure
                chain = (replace(before, chain=()), *before.chain)
            announced = _IPYTHON_HEAD.match(text)
            self._open = _Open(
                ignored=self._ignored_next,
                chain=chain,
                announced=announced["type"] if announced is not None else "",
                box=len(text.strip()) if "╭" in text else 0,
            )
        self._ignored_next = self._pending_chain = False
        self.patience = MAX_FRAMES

    def _inside(self, text: str, at: Moment) -> bool:
        frame = _FRAME.match(text) or _RICH_FRAME.match(text) or _IPYTHON_FRAME.match(text)
        if frame is not None:
            self._add(Frame(file=frame["file"], line=int(frame["line"]), function=frame["function"] or ""))
            self._after_code = True
            return True
        marked = _RICH_CODE.match(text)
        if marked is not None:
            self._code(marked["code"].strip(), replacing=True)
            return True
        if self._last is not None and not self._after_code and not self._names_another(text):
            return self._in_message(text, at)  # of one of several, before the next line of another one
        if text[:1] in (" ", "\t") and not _FOREIGN.match(text):
            if not _CARETS.match(text) and not _REPEATED.match(text):
                self._code(text.strip())
            return True
        named = _NAMED.match(text.rstrip())
        if named is not None and self._plausible(named):
            self._raised(named, at)
            return True
        self._after_code = False
        if self._open is not None and not self._open.headers:
            self._open = None
            self.patience = 0
        return False

    def _names_another(self, text: str) -> bool:
        named = _NAMED.match(text.rstrip())
        return named is not None and self._plausible(named)

    def _plausible(self, named: re.Match[str]) -> bool:
        """True if a word at the start of a line is the name of an exception rather than a label."""
        if self._open is None or not (self._open.frames or named["type"] == self._open.announced):
            return False
        if _LIKELY.search(named["type"]) is not None:
            return True
        return self._after_code and named["type"][:1].isupper() and not _FIGURE.match(named["message"] or "")

    def _add(self, frame: Frame) -> None:
        if self._open is not None and len(self._open.frames) < MAX_FRAMES:
            self._open.frames.append(frame)

    def _code(self, text: str, *, replacing: bool = False) -> None:
        frames = self._open.frames if self._open is not None else []
        if frames and (replacing or not frames[-1].text):
            frames[-1] = replace(frames[-1], text=text[:300])

    def _raised(self, named: re.Match[str], at: Moment) -> None:
        self._close_message()
        opened = self._open
        if opened is None:
            return
        self._message = [(named["message"] or "", at.line)]
        self._fenced = self._after_code = False
        self._box, self._written = opened.box, named.string
        failure = Failure(
            rank=self._rank,
            type=named["type"],
            message="",
            frames=tuple(opened.frames),
            source=self._source,
            line=at.line,
            step=at.step,
            time=at.time,
            chain=opened.chain,
        )
        self._last = None if opened.ignored else Raised(failure, at.progress)
        opened.headers -= 1
        if opened.headers <= 0:
            self._open = None
        self.patience = MAX_MESSAGE_LINES

    def _in_message(self, text: str, at: Moment) -> bool:
        """A further line of the last exception's message, as long as nothing else begins."""
        if self._last is None or len(self._message) >= MAX_MESSAGE_LINES or _FOREIGN.match(text):
            self._close_message()
            return False
        self._fenced = self._fenced or text.startswith("```")
        line = "" if self._fenced else text.rstrip()
        if _had_no_room(self._written, line, self._box):
            said, place = self._message[-1]
            self._message[-1] = (f"{said} {line}", place)
        else:
            self._message.append((line, at.line))
        self._written = line
        return True

    def _close_message(self) -> None:
        if self._last is not None:
            texts, lines = zip(*self._message, strict=True)
            failure = replace(self._last.failure, message="\n".join(texts).rstrip(), message_lines=lines)
            self.done.append(Raised(_of_worker(failure), self._last.progress))
            self._last = None
            self.patience = max(self.patience, 3)
        self._message = []


def _had_no_room(before: str, line: str, box: int) -> bool:
    """True if rich broke a message there: the next word had no room any more, in the terminal or beside the box."""
    word = line.split(maxsplit=1)[:1]
    if not (box and word) or line[:1].isspace():
        return False
    return any(len(before) <= width < len(before) + 1 + len(word[0]) for width in (box, _RICH_WIDTH))


def _of_worker(failure: Failure) -> Failure:
    """The exception of a worker of Ray, where this one holds its traceback in the message; else this one."""
    worker = _RAY.search(failure.type)
    if worker is None:
        return failure
    lines = failure.message.splitlines()
    matched = ((at, _NAMED.match(line)) for at, line in enumerate(lines))
    ends = [(at, named) for at, named in matched if named is not None and named["type"].endswith(worker["type"])]
    if not ends:
        return failure
    end, named = ends[-1]
    frames = [
        Frame(file=frame["file"], line=int(frame["line"]), function=frame["function"] or "", text=following.strip())
        for line, following in pairwise(lines[:end])
        if (frame := _FRAME.match(line)) is not None
    ]
    return replace(
        failure,
        type=named["type"],
        message="\n".join((named["message"] or "", *lines[end + 1 :])),
        frames=tuple(frames) or failure.frames,
        line=failure.message_lines[end],
        message_lines=failure.message_lines[end:],
    )
