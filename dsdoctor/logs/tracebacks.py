"""Exceptions out of the tracebacks in a log, one reader for each stream of lines (a file, or a rank's prefix in it).

Tracebacks of several ranks may be interleaved in one stream without any prefix. Then several are open at once and share
their frames; each exception line ends one of them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from dsdoctor.logs import grammar
from dsdoctor.logs.unwrap import Unwrapped
from dsdoctor.runs.facts import Failure, Frame

MAX_MESSAGE_LINES = 60
MAX_FRAMES = 400

_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+)(?:, in (?P<function>.+?))?\s*$')
_RICH_FRAME = re.compile(r"^\s*(?P<file>[\w./\\~-]+\.py):(?P<line>\d+) in (?P<function>[\w<>.]+)\s*$")
_RICH_CODE = re.compile(r"^\s*❱\s*\d+\s*[│|]?\s*(?P<code>.*)$")
_REPEATED = re.compile(r"^\s*\[Previous line repeated \d+ more times?\]")
_CARETS = re.compile(r"^\s*[\^~]+\s*$")
_NAMED = re.compile(r"^(?P<type>(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?:\([\w.]+\))?)(?:: (?P<message>.*)|:?\s*)$")
_LIKELY = re.compile(r"(?:Error|Exception|Exit|Interrupt|Warning|Timeout|Failure|Fault|Empty|Full|Iteration)\)?$|\.")
_FIGURE = re.compile(r"^[-+\d.,\s%e/]+$")
_BARE = re.compile(r"^(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?:Error|Exception): ")
_TORCH_PREFIX = re.compile(r"\[rank\d+\]: ?$")
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
    """The traceback(s) being read on a stream."""

    ignored: bool
    frames: list[Frame] = field(default_factory=list)
    headers: int = 1
    chain: tuple[Failure, ...] = ()


def is_bare(line: Unwrapped) -> bool:
    """True for the last line of a traceback as torch prints it: `[rank5]: Type: message`.

    torch puts the rank in front of what ends a process, so such a line is no quotation even where the rest is missing.
    """
    return _TORCH_PREFIX.search(line.prefix) is not None and _BARE.match(line.text) is not None


class TracebackReader:
    """Collects the exceptions of one stream. Feed it every line from the header of a traceback on while `busy`."""

    def __init__(self, source: str, rank: int | None) -> None:
        self._source = source
        self._rank = rank
        self._open: _Open | None = None
        self._last: Raised | None = None
        self._message: list[tuple[str, int]] = []
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
            self._header()
            return True
        if text.startswith(grammar.IGNORED):
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
        """Read the line of an exception whose traceback may not be in the log. True: it always is a part of one."""
        if self._open is None:
            self._close_message()
            self._open = _Open(ignored=False)
        named = _NAMED.match(text.rstrip())
        if named is not None:
            self._raised(named, at)
        return True

    def interrupt(self) -> None:
        """Something else was printed, or the stream has ended: a message that was being read is complete."""
        self._close_message()

    def _header(self) -> None:
        self._close_message()
        if self._open is not None:
            self._open.headers += 1
        else:
            chain: tuple[Failure, ...] = ()
            if self._pending_chain and self.done:
                before = self.done.pop().failure
                chain = (replace(before, chain=()), *before.chain)
            self._open = _Open(ignored=self._ignored_next, chain=chain)
        self._ignored_next = self._pending_chain = False
        self.patience = MAX_FRAMES

    def _inside(self, text: str, at: Moment) -> bool:
        frame = _FRAME.match(text) or _RICH_FRAME.match(text)
        if frame is not None:
            self._add(Frame(file=frame["file"], line=int(frame["line"]), function=frame["function"] or ""))
            self._after_code = True
            return True
        marked = _RICH_CODE.match(text)
        if marked is not None:
            self._code(marked["code"].strip(), replacing=True)
            return True
        if text[:1] in (" ", "\t") and not _FOREIGN.match(text):
            if not _CARETS.match(text) and not _REPEATED.match(text):
                self._code(text.strip())
            return True
        named = _NAMED.match(text.rstrip())
        if named is not None and self._open is not None and self._open.frames and self._plausible(named):
            self._raised(named, at)
            return True
        self._after_code = False
        return False

    def _plausible(self, named: re.Match[str]) -> bool:
        """True if a word at the start of a line is the name of an exception rather than a label."""
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
        self._message.append((text.rstrip(), at.line))
        return True

    def _close_message(self) -> None:
        if self._last is not None:
            texts, lines = zip(*self._message, strict=True)
            failure = replace(self._last.failure, message="\n".join(texts).rstrip(), message_lines=lines)
            self.done.append(Raised(failure, self._last.progress))
            self._last = None
            self.patience = max(self.patience, 3)
        self._message = []
