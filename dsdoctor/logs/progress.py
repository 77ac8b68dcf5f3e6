"""How far the sources of a job got: steps, the end of the work, and where a launcher started the ranks again."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_ATTEMPT = re.compile(r"(?P<job>.*[/\\])attempt_(?P<number>\d+)[/\\]")
"""The folder in which torchrun keeps the logs of one attempt."""
THAT_CLEARS = 3
"""Steps done after an exception, or another end, from which on it had not ended the job."""


@dataclass
class Progress:
    """What the lines of progress have shown so far. `order` is a place in the story of all sources.

    A job that is started again in the same file may go on where it was, at a checkpoint before, or at its beginning:
    from then on its steps are new ones whatever their numbers are.
    """

    step: int | None = None
    """The last step that a line of progress named."""
    first_step: int | None = None
    """The lowest step that a line of progress named, since the last start."""
    steps_seen: int = 0
    """The highest step since the last start."""
    shown: int = 0
    """How many lines of progress there were: those with a step beyond all before."""
    last: int | None = None
    """The order of the last of them."""
    finished: int | None = None
    """The order of the last line that says that a process, or the work, is done."""
    _reached: dict[str, int] = field(default_factory=dict)
    """The steps that each source has shown, those before a new start included."""
    _finished_at: dict[str, int] = field(default_factory=dict)
    """The last line of each source that says that the work, and not only a process, is done."""
    _starts: dict[str, _Start] = field(default_factory=dict)
    _latest: dict[str, int] = field(default_factory=dict)
    """The latest attempt of each of torchrun's jobs whose logs show that it trains."""

    def done(self, source: str, step: int, order: int) -> None:
        """A step was done. Only a step beyond all before counts as progress."""
        self.first_step = step if self.first_step is None else min(step, self.first_step)
        self.counted(source, step, order)
        self.step = step

    def counted(self, source: str, count: int, order: int) -> None:
        """At least so many steps were done, which have no number."""
        if count > self.steps_seen:
            self.shown += 1
            self.last = order
            self.steps_seen = count
        start, before = self._starts.get(source), self.reached(source)
        self._reached[source] = now = max(before, count if start is None else start.reached(count))
        if before < THAT_CLEARS <= now and (attempt := _ATTEMPT.match(source)) is not None:
            self._latest[attempt["job"]] = max(int(attempt["number"]), self._latest.get(attempt["job"], 0))

    def ended(self, source: str, line: int, order: int, *, work: bool) -> None:
        """A line says that a process has ended well, or that the work is done."""
        self.finished = order
        if work:
            self._finished_at[source] = line

    def started(self, source: str, line: int) -> bool:
        """A launcher starts the ranks there. True if they had trained before, so that this is another attempt."""
        before = self._starts.get(source) or _Start(0, 0, 0, False)
        if self.reached(source) <= before.done:
            return False
        self._starts[source] = _Start(
            line,
            self.reached(source),
            max(self.steps_seen, before.steps),
            before.after_work or self.finished_after(source, before.line),
        )
        if len(self._reached) == 1:
            self.step, self.first_step, self.steps_seen = None, None, 0
        return True

    def attempt(self, source: str) -> int:
        """The line at which the present attempt of that source begins."""
        start = self._starts.get(source)
        return start.line if start is not None else 0

    def reached(self, source: str) -> int:
        """How many steps that source has shown."""
        return self._reached.get(source, 0)

    def went_on(self, source: str, reached: int, line: int | None) -> bool:
        """True if that source shows steps beyond those it had reached when something came at that line.

        A few steps are enough where the end of the work follows them.
        """
        more = self.reached(source) - reached
        return self.replaced(source) or more >= THAT_CLEARS or (more > 0 and self.finished_after(source, line))

    def replaced(self, source: str) -> bool:
        """True if torchrun started the ranks again, and the logs of a later attempt show that they train."""
        mine = _ATTEMPT.match(source)
        return mine is not None and int(mine["number"]) < self._latest.get(mine["job"], 0)

    def finished_after(self, source: str, line: int | None) -> bool:
        """True if that source says below that line that the work is done."""
        return (line or 0) < self._finished_at.get(source, 0)

    def begins(self) -> int:
        """The line from which on the only source tells of the attempt that counts.

        That is the last one, if it came as far as the one before, or did its work; else all of them count. One that
        had done its work counts too: what follows is another job.
        """
        start = next(iter(self._starts.values()), None)
        if start is None or start.after_work or len(self._reached) > 1:
            return 0
        source = next(iter(self._starts))
        further = self.steps_seen >= start.steps or self.finished_after(source, start.line)
        return start.line if further and self.went_on(source, start.done, start.line) else 0

    def most(self) -> int:
        """The highest step of the attempts that count."""
        earlier = 0 if self.begins() else max((start.steps for start in self._starts.values()), default=0)
        return max(self.steps_seen, earlier)


@dataclass
class _Start:
    """A new start: its line, the steps of its source before it, their highest number, and whether a job had done
    its work with them.
    """

    line: int
    done: int
    steps: int
    after_work: bool
    _origin: int | None = None

    def reached(self, step: int) -> int:
        """The steps of the source when this one is done, the first since the start being one more than before."""
        if self._origin is None:
            self._origin = step - 1
        return self.done + step - self._origin
