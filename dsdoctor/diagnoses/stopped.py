"""Jobs that somebody outside stopped: a closed terminal, a scheduler, a person."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from dsdoctor.case import Case
from dsdoctor.diagnoses import context
from dsdoctor.diagnoses.base import Diagnosis
from dsdoctor.diagnoses.explained import holds
from dsdoctor.diagnoses.forms import Form, TextDiagnosis
from dsdoctor.diagnoses.peers import is_peer_failure
from dsdoctor.diagnoses.processes import SIGTERM, endings
from dsdoctor.finding import Evidence, Finding, Fix
from dsdoctor.logs.facts import LogEvent, LogFacts
from dsdoctor.runs.facts import Failure

_REASONS = re.compile(r"DUE TO|walltime|RUNLIMIT")
"""A notice that says why: no answer of the scheduler to a process that failed."""


class Hangup(TextDiagnosis):
    """The terminal was closed: the launcher received SIGHUP.

    What it is: torchrun passes the death signal 1 on and stops all ranks. `nohup` alone does not help, since the
    launcher installs its own handler.

    What proves it: "Received 1 death signal" (the 1 is the number of the signal, not a count) or "got signal: 1".

    When it could be wrong: schedulers can send SIGHUP as well.

    What to do: run it inside tmux or screen, as a service (`systemd-run --user`), with `setsid nohup ...`, or under a
    scheduler. `nohup` alone does not do.
    """

    id = "launch/sighup"
    severity = "error"
    title = "the terminal was closed (SIGHUP)"
    forms = (Form(types=("SignalException",), message=r"got signal: (?:1$|1\b(?!\d)|.*SIGHUP)"),)
    kinds = ("sighup",)
    cause = "the launcher received SIGHUP (signal 1), which is what closing a terminal sends, and stopped all ranks"
    fixes = (Fix(text="start it inside tmux or screen, as a service, or under a scheduler"),)


class Cancelled(TextDiagnosis):
    """The scheduler, or a person, ended the job.

    What it is: a time limit, preemption, `scancel` or Ctrl-C: every rank is stopped at once and nothing failed before.

    What proves it: the scheduler's notice (Slurm, PBS, LSF), SIGTERM or SIGINT received by the launcher itself, or
    ranks that ended with SIGTERM (-15, 143) though no other one had failed.

    When it could be wrong: an operator may cancel a job *because* it hangs; then the hang is the cause. srun cancels
    the step when one task has failed ("STEP ... CANCELLED" after "Exited with exit code"): then that task is the root.

    What to do: a longer limit (`--time`, `--signal=USR1@120` for a warning before it), or checkpoints and resuming.
    """

    id = "launch/cancelled"
    severity = "error"
    title = "the job was ended from outside"
    forms = (
        Form(types=("SignalException",), message=r"got signal: (?:2|15|.*SIG(?:TERM|INT))\b"),
        Form(types=("KeyboardInterrupt",)),
    )
    kinds = ("cancelled",)
    confidence = 0.8
    cause = "the job was ended from outside: a time limit, preemption, a cancel command or Ctrl-C"
    fixes = (Fix(text="ask for more time, or write checkpoints and resume"),)

    def applies(self, failure: Failure, case: Case) -> bool:
        """Only where nothing else had failed before."""
        first = next((f for f in context.failures(case) if not is_peer_failure(f)), failure)
        return self.matched(first) is not None

    def events(self, case: Case) -> list[LogEvent]:
        """The notices that are not only the scheduler's answer to a process that had failed."""
        return [event for event in super().events(case) if not _answers(event, case)]

    def examine(self, case: Case) -> Iterator[Finding]:
        """Who stops a job that hangs, or seems to, only answers to that."""
        found = list(super().examine(case)) or self._terminated(case)
        follows = any(found) and holds(case, "comm/p2p-hang", "hang/slow-not-hung", "build/jit-lock")
        for one in found:
            yield replace(one, role="consequence") if follows else one

    def _terminated(self, case: Case) -> list[Finding]:
        """Ranks that somebody sent SIGTERM: no launcher stopped them, since no process had failed."""
        ended = list(endings(case))
        asked = case.logs is None or any(case.logs.of_kind("closing-signal"))
        if not ended or asked or any(e.code != SIGTERM for e in ended) or any(context.failures(case)):
            return []
        return [
            self.finding(
                cause="the ranks were sent SIGTERM from outside, and no process had failed before",
                evidence=tuple(ending.evidence for ending in ended[:2]),
                confidence=0.6,
                caveat="A rank on another node may have failed; its log would say so.",
                fixes=self.fixes,
            )
        ]


def _answers(event: LogEvent, case: Case) -> bool:
    """True if a process had failed by itself before that notice, which gives no reason of its own."""
    if case.logs is None or _REASONS.search(event.text) is not None:
        return False
    return any(_before(one, event) for one in _ends_of(case.logs, case))


def _ends_of(logs: LogFacts, case: Case) -> Iterator[tuple[Evidence, int | None]]:
    """Where processes ended by themselves: the place, and its order in the story where that is known."""
    yield from ((exit.evidence, exit.order) for exit in logs.exits if not exit.by_launcher)
    yield from ((event.evidence(), event.order) for event in logs.of_kind("oom-kill"))
    yield from ((context.evidence(f), None) for f in context.failures(case) if not is_peer_failure(f))


def _before(end: tuple[Evidence, int | None], event: LogEvent) -> bool:
    place, order = end
    if order is not None:
        return order < event.order
    return place.source != event.source or (place.line or 0) < event.line


DIAGNOSES: tuple[Diagnosis, ...] = (Hangup(), Cancelled())
