"""Timeouts of collectives as the ranks' own words tell them: who waited, in what, since when, and who says nothing."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from datetime import datetime, timedelta

from dsdoctor.case import Case
from dsdoctor.diagnoses import context
from dsdoctor.diagnoses.peers import is_peer_failure
from dsdoctor.diagnoses.processes import KILL, SEGMENTATION_FAULT, signal_code
from dsdoctor.diagnoses.shared_memory import SIGBUS
from dsdoctor.finding import Evidence
from dsdoctor.logs.facts import LogEvent, LogFacts

FIRST_COLLECTIVES = 10
"""A SeqNum up to this is one of the first collectives of a job, before training."""
KEY_NEVER_CAME = re.compile(
    r"\[(?P<rank>\d+)\] is setting up NCCL .*got error: (?:Timeout waiting|wait timeout|Socket Timeout)"
)
"""What a rank raises that waits for rank 0 to open the first communicator."""
_TIMED_OUT = re.compile(
    r"collective operation timeout|Timed out waiting \d+ms|^wait timeout after|^Socket Timeout$"
    rf"|{KEY_NEVER_CAME.pattern}"
)
_GATHERS = ("ALLGATHER", "_ALLGATHER_BASE", "REDUCE_SCATTER", "_REDUCE_SCATTER_BASE")
_CAUSES_OF_HANGS = ("device-assert", "gpu-fault", "ib-completion", "connect-failed", "oom-kill")
_DEADLY = (KILL, SEGMENTATION_FAULT, SIGBUS, -signal.SIGILL, -signal.SIGFPE)
"""How a process dies that the others then wait for; SIGABRT is how the watchdog ends its own."""
_CLOCK = re.compile(r"\b[EWF]\d{3,4} (?P<clock>\d\d:\d\d:\d\d)")


def timeouts(case: Case) -> list[LogEvent]:
    """The watchdog's lines, one a rank and collective."""
    return list(case.logs.of_kind("watchdog")) if case.logs is not None else []


def different(late: Sequence[LogEvent]) -> tuple[LogEvent, LogEvent] | None:
    """Two ranks that name the same collective otherwise."""
    first: dict[str, LogEvent] = {}
    for event in late:
        other = first.setdefault(event.fields["seq"], event)
        if other.rank != event.rank and call(other) != call(event):
            return other, event
    return None


def call(event: LogEvent) -> str:
    """The collective in the line: its operation and size."""
    numel = event.fields.get("numel")
    return event.fields["op"] + (f" of {numel} elements" if numel else "")


def moment(event: LogEvent) -> str:
    """The clock when the rank began to wait: that of the line minus the time limit; empty if the line has none."""
    found = _CLOCK.search(event.text)
    if found is None:
        return ""
    began = datetime.strptime(found["clock"], "%H:%M:%S") - timedelta(milliseconds=int(event.fields["timeout"]))
    return began.strftime("%H:%M:%S")


def behind(case: Case) -> tuple[LogEvent, LogEvent] | None:
    """The rank that had called the fewest collectives of a group, and the one with the most, by their own counts."""
    groups: dict[str, dict[int | None, LogEvent]] = {}
    for event in case.logs.of_kind("work-count") if case.logs is not None else ():
        groups.setdefault(event.fields.get("group", ""), {}).setdefault(event.rank, event)
    for said in groups.values():
        least, most = min(said.values(), key=_called), max(said.values(), key=_called)
        if _called(least) < _called(most):
            return least, most
    return None


def _called(event: LogEvent) -> int:
    return int(event.fields["enqueued"])


def silent_ranks(logs: LogFacts, late: Sequence[LogEvent | Evidence]) -> tuple[int, ...]:
    """Ranks that are known of and that did not report the timeout."""
    known = {*logs.ranks, *(exit.rank for exit in logs.exits if exit.rank is not None)}
    known |= set(range(max((one.rank or 0 for one in late), default=0) + 1))
    return tuple(sorted(known - {one.rank for one in late}))


def other_cause(case: Case) -> bool:
    """True if something else happened that a timeout would only follow."""
    if any(not is_peer_failure(failure) for failure in context.failures(case)):
        return True
    return case.logs is not None and (any(case.logs.of_kind(*_CAUSES_OF_HANGS)) or _died_before(case, case.logs))


def _died_before(case: Case, logs: LogFacts) -> bool:
    """True if a process had been killed or had crashed before the first rank gave up waiting.

    torchrun kills ranks that do not answer to SIGTERM, and lists them below the one that failed: these come later.
    """
    late = [(event.source, event.line) for event in logs.of_kind("watchdog")]
    late += [(f.source, f.line or 0) for f in context.failures(case) if _TIMED_OUT.search(f.message) is not None]
    first = min((line for _, line in late), default=0)
    dead = (exit.evidence for exit in logs.exits if signal_code(exit.code) in _DEADLY and not exit.by_launcher)
    return any(
        late and not one.text.lstrip().startswith("exitcode") and (one.source != late[0][0] or (one.line or 0) < first)
        for one in dead
    )


def gather_timeouts(case: Case) -> list[LogEvent]:
    """Timeouts in the gathers of ZeRO-3 that nothing else explains."""
    if context.stage(case) != 3 or other_cause(case):
        return []
    return [event for event in timeouts(case) if event.fields["op"] in _GATHERS]


def timed_out(case: Case) -> tuple[Evidence, ...]:
    """The lines that say that a collective timed out; empty if something else went wrong that it would only follow."""
    if other_cause(case):
        return ()
    raised = tuple(context.evidence(f) for f in context.failures(case) if _TIMED_OUT.search(f.message))
    status = tuple(e.evidence() for e in case.logs.of_kind("watchdog-status")) if case.logs is not None else ()
    return tuple(event.evidence() for event in timeouts(case)) or raised or status


def timeouts_as_evidence(case: Case) -> list[Evidence]:
    """The watchdog's lines where they only follow another failure."""
    return [event.evidence() for event in timeouts(case)] if other_cause(case) else []
