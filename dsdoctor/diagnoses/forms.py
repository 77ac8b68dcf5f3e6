"""Diagnoses that are recognised by what an exception, or a line of a log, says.

A `Form` describes an exception by its type, its message and the code it came through; a `TextDiagnosis` lists the forms
(and kinds of log events) that mean it. Forms are searched in the message alone, never in advice that is printed around
it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from dsdoctor.case import Case
from dsdoctor.diagnoses import context
from dsdoctor.diagnoses.base import Diagnosis
from dsdoctor.finding import Evidence, Finding, Fix
from dsdoctor.frames import passes_through, users_line
from dsdoctor.logs.facts import LogEvent
from dsdoctor.runs.facts import Failure

MAX_EVIDENCE = 4
"""Pieces of evidence shown of one finding; more ranks that say the same add nothing."""


@dataclass(frozen=True, kw_only=True)
class Form:
    """How an exception looks. What is empty is not asked for.

    `message` is a regular expression to be found in the message, `types` are class names without module, `frames` is a
    regular expression to be found in `file:function:text` of some line of the traceback.
    """

    message: str = ""
    types: tuple[str, ...] = ()
    frames: str = ""

    def match(self, failure: Failure) -> re.Match[str] | None:
        """The match in the message, or None if the exception does not look like this."""
        if self.types and failure.type.rpartition(".")[2] not in self.types:
            return None
        if self.frames and not passes_through(failure.frames, self.frames):
            return None
        return re.search(self.message, failure.message)


class TextDiagnosis(Diagnosis):
    """A diagnosis that an exception of one of `forms`, or a log event of one of `kinds`, proves.

    `cause` is its sentence; `{name}` in it stands for a group of the form that matched (groups must then be in every
    form). A subclass may override `applies` for what a form cannot say, and `tell` for a sentence of its own.
    """

    forms: ClassVar[tuple[Form, ...]] = ()
    kinds: ClassVar[tuple[str, ...]] = ()
    confidence: ClassVar[float] = 0.9
    cause: ClassVar[str]
    fixes: ClassVar[tuple[Fix, ...]] = ()
    keys: ClassVar[tuple[str, ...]] = ()
    caveat: ClassVar[str | None] = None

    def claims(self, failure: Failure, case: Case) -> bool:
        return self.matched(failure) is not None and self.applies(failure, case)

    def applies(self, failure: Failure, case: Case) -> bool:
        """True if a failure that has the form means this diagnosis in this case."""
        return True

    def matched(self, failure: Failure) -> re.Match[str] | None:
        """The match of the first form that the exception, or one that it was raised from, has."""
        found = self._recognised(failure)
        return found[1] if found is not None else None

    def _recognised(self, failure: Failure) -> tuple[Failure, re.Match[str]] | None:
        """The exception that has a form, this one or one that it was raised from, and the match."""
        for one in (failure, *failure.chain):
            for form in self.forms:
                match = form.match(one)
                if match is not None:
                    return one, match
        return None

    def examine(self, case: Case) -> Iterator[Finding]:
        claimed = [failure for failure in context.failures(case) if self.claims(failure, case)]
        events = self.events(case)
        if claimed:
            yield self.told(case, claimed, events)
        elif events:
            yield self.told_by_events(case, events)

    def events(self, case: Case) -> list[LogEvent]:
        """The events of the logs that mean this diagnosis, oldest first."""
        return list(case.logs.of_kind(*self.kinds)) if case.logs is not None and self.kinds else []

    def tell(self, groups: Mapping[str, str]) -> str:
        """The sentence that says what happened, with the words of the message in it."""
        return self.cause.format_map(groups)

    def remedies(self, groups: Mapping[str, str]) -> tuple[Fix, ...]:
        """What to do, where that depends on the words of the message."""
        return self.fixes

    def told(self, case: Case, claimed: list[Failure], events: list[LogEvent]) -> Finding:
        """The finding for exceptions, oldest first."""
        recognised = self._recognised(claimed[0])
        first, match = recognised if recognised is not None else (claimed[0], None)
        proof = [context.evidence(first), *self._decisive(first)]
        proof += [context.evidence(claimed[0])] if first is not claimed[0] else []
        proof += [*users_lines(claimed[0]), *(context.evidence(failure) for failure in claimed[1:])]
        proof += [event.evidence() for event in events]
        return self._finding(match.groupdict(default="?") if match else {}, proof)

    def _decisive(self, failure: Failure) -> tuple[Evidence, ...]:
        """The line of a long message that has the form, if it is not the first one."""
        match = next((m for form in self.forms if (m := form.match(failure)) is not None), None)
        index = failure.message.count("\n", 0, match.start()) if match is not None else 0
        if index == 0:
            return ()
        text = failure.message.splitlines()[index].strip()
        line = failure.message_lines[index] if index < len(failure.message_lines) else None
        return (Evidence(source=failure.source, line=line, rank=failure.rank, text=text),)

    def told_by_events(self, case: Case, events: list[LogEvent]) -> Finding:
        """The finding for events of a log, oldest first."""
        return self._finding(dict(events[0].fields), [event.evidence() for event in events])

    def _finding(self, groups: Mapping[str, str], proof: list[Evidence]) -> Finding:
        return self.finding(
            cause=self.tell(groups),
            evidence=tuple(proof[:MAX_EVIDENCE]),
            confidence=self.confidence,
            caveat=self.caveat,
            fixes=self.remedies(groups),
            keys=self.keys,
        )


def users_lines(failure: Failure) -> tuple[Evidence, ...]:
    """The innermost line of the user's own code in the traceback, as evidence; empty if there is none."""
    frame = users_line(failure.frames)
    if frame is None:
        return ()
    text = f'File "{frame.file}", line {frame.line}, in {frame.function}' + (f": {frame.text}" if frame.text else "")
    return (Evidence(source=failure.source, rank=failure.rank, text=text),)
