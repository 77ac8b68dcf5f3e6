"""Exceptions and exits of a job, and which of them ended it: those that no steps after them show to be survived."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dsdoctor.logs.facts import ProcessExit
from dsdoctor.logs.progress import THAT_CLEARS, Progress
from dsdoctor.runs.facts import Failure

MAX_FAILURES = 200
MAX_EXITS = 2000


@dataclass
class Endings:
    """Collects them; `progress` is that of the same story."""

    progress: Progress
    _exits: dict[tuple[int | None, int, int], _Exited] = field(default_factory=dict)
    """By rank, code and attempt."""
    _raised: list[_Candidate] = field(default_factory=list)

    def exit(self, exit: ProcessExit) -> None:
        """A launcher reports the end of a process; repeats are not kept."""
        source = exit.evidence.source
        key, reached = (exit.rank, exit.code, self.progress.attempt(source)), self.progress.reached(source)
        if len(self._exits) < MAX_EXITS or key in self._exits:
            self._exits.setdefault(key, _Exited(exit, reached)).reached = reached

    def failure(self, failure: Failure, order: int, shown: int) -> None:
        """An exception; `shown` is what `progress.shown` was when it came."""
        if len(self._raised) < MAX_FAILURES:
            reached = self.progress.reached(failure.source)
            self._raised.append(_Candidate(failure, order, shown, self.progress.shown - shown, reached))

    def exits(self) -> tuple[ProcessExit, ...]:
        """The ends of processes after which their source did not go on."""
        ended = ((one.exit, one.exit.evidence, one.reached) for one in self._exits.values())
        return tuple(
            exit for exit, place, reached in ended if not self.progress.went_on(place.source, reached, place.line)
        )

    def failures(self, exits: Sequence[ProcessExit], last_line: int | None) -> tuple[Failure, ...]:
        """The exceptions that were not survived, oldest first; `last_line` is where the log ends.

        Where a process failed by itself and no such exception is left, what it printed before came late, out of a
        buffer: then the last exception counts.
        """
        died = any(exit.code != 0 for exit in exits)
        kept = [candidate for candidate in self._raised if not self._survived(candidate)]
        if not kept and any(exit.code > 0 for exit in exits):
            kept = self._raised[-1:]
        finished = self.progress.finished
        if finished is not None and not died:
            kept = [candidate for candidate in kept if not self._worked_on(candidate, finished)]
        kept = _believed(kept, died, last_line)
        timed = all(candidate.failure.time is not None for candidate in kept)
        ordered = sorted(kept, key=lambda one: ((one.failure.time or 0.0) if timed else 0.0, one.order))
        return tuple(candidate.failure for candidate in ordered)

    def _survived(self, candidate: _Candidate) -> bool:
        """True if steps were done after that exception, and not only those that another source tells of."""
        later = self.progress.shown - candidate.shown
        reached = self.progress.reached(candidate.failure.source)
        passed = candidate.passed if reached <= candidate.reached else later
        return passed >= THAT_CLEARS or self.progress.replaced(candidate.failure.source)

    def _worked_on(self, candidate: _Candidate, finished: int) -> bool:
        """True if the work was done after that exception, which may have been read as a whole only later."""
        failure = candidate.failure
        return candidate.order <= finished or self.progress.finished_after(failure.source, failure.line)


def _believed(kept: list[_Candidate], died: bool, last_line: int | None) -> list[_Candidate]:
    """Without the lines `Type: message` that no traceback and no rank belongs to, unless the log ends with one.

    A script prints such a line of an exception that it has caught; the end of a log that was pasted is one too.
    """
    alone = [candidate for candidate in kept if not candidate.failure.frames and candidate.failure.rank is None]
    full = [candidate for candidate in kept if candidate not in alone]
    if full or not alone:
        return full
    return alone if died or last_line in alone[-1].failure.message_lines else []


@dataclass
class _Candidate:
    failure: Failure
    order: int
    shown: int
    passed: int
    """Steps that were done from when it came to when its last line was read."""
    reached: int
    """The steps that its source had shown then."""


@dataclass
class _Exited:
    exit: ProcessExit
    reached: int
    """The steps that its source had shown when it came last."""
