"""The exception that ended the first rank, and what the other ranks say because of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dsdoctor.case import Case
from dsdoctor.diagnoses import context
from dsdoctor.diagnoses.base import Diagnosis
from dsdoctor.diagnoses.explained import explained, has_specific_root
from dsdoctor.diagnoses.forms import MAX_EVIDENCE, users_lines
from dsdoctor.diagnoses.internal import InternalError
from dsdoctor.diagnoses.network import NcclError
from dsdoctor.diagnoses.peers import is_peer_failure
from dsdoctor.diagnoses.processes import after_the_work, endings, signal_code
from dsdoctor.diagnoses.signals import Abort
from dsdoctor.diagnoses.timeouts import timeouts_as_evidence
from dsdoctor.finding import Finding, Fix
from dsdoctor.frames import users_line
from dsdoctor.runs.facts import Failure


class UserException(Diagnosis):
    """A rank's own Python exception ended the job.

    What it is: the script (or what it calls) raised, and nothing more specific is known about that exception. The
    launcher then stops the other ranks and prints a summary that hides it.

    What proves it: the first traceback of a rank that is no answer to the loss of another rank.

    When it could be wrong: where several ranks raise at nearly the same time, the first in the log need not be the
    first in time. The launcher's "Root Cause" and the `--local_rank=N` in its last line do not settle it: the former
    goes by the order of polling, the latter names the rank that was started last.

    What to do: read that exception, at the line of your code that it came through. Where the log holds only the
    launcher's summary, start again with `torchrun --redirects 3 --tee 3 --log-dir logs ...` (one file a rank) or, with
    the `deepspeed` command, `--enable_each_rank_log logs`; decorate `main` with
    `torch.distributed.elastic.multiprocessing.errors.record` to have the traceback in the summary.
    """

    id = "launch/user-exception"
    severity = "error"
    title = "a rank raised an exception"

    def examine(self, case: Case) -> Iterator[Finding]:
        raised = [failure for failure in context.failures(case) if failure.type != context.NATIVE]
        own = [failure for failure in raised if not is_peer_failure(failure)]
        if not own:
            yield from self._exit_in_log(case)
        elif not explained(own[0], case) and not any(any(rule.examine(case)) for rule in _ALSO_GENERAL):
            yield self._raised(own[0], own[1:])

    def _raised(self, first: Failure, others: Sequence[Failure]) -> Finding:
        place = users_line(first.frames) or (first.frames[-1] if first.frames else None)
        where = f" at {place.file}:{place.line} in {place.function}" if place is not None else ""
        said = first.message.strip().splitlines()[0] if first.message.strip() else "(no message)"
        who = f"rank {first.rank}" if first.rank is not None else "the script"
        same = [context.evidence(failure) for failure in others if failure.type == first.type]
        return self.finding(
            cause=f"{who} raised {first.type}: {said}{where}",
            evidence=(context.evidence(first), *users_lines(first), *same)[:MAX_EVIDENCE],
            confidence=0.85 if first.frames else 0.7,
            fixes=(Fix(text=f"mend it{where}" if where else "read the traceback of that rank"),),
        )

    def _exit_in_log(self, case: Case) -> Iterator[Finding]:
        """A launcher reports a process that failed by itself, and the exception is not in the log."""
        if case.logs is None or case.logs.failures or any(signal_code(e.code) < 0 for e in case.logs.exits):
            return
        if any(case.logs.of_kind("native-error")):
            return
        left = [exit for exit in case.logs.exits if exit.code > 0]
        if left and not has_specific_root(case):
            who = f"rank {left[0].rank}" if left[0].rank is not None else "a process"
            yield self.finding(
                cause=f"{who} ended with exit code {left[0].code}; what it raised is not in this log",
                evidence=(left[0].evidence,),
                confidence=0.4,
                caveat="The traceback of the rank itself is missing; the launcher's report does not say why.",
                fixes=(Fix(text="look for the rank's own output: torchrun --tee 3, or one file a rank"),),
            )


_ALSO_GENERAL = (InternalError(), Abort(), NcclError())
"""Diagnoses that say little more of an exception, but whose it is."""


class PeerFailure(Diagnosis):
    """A rank stopped because another one did.

    What it is: when a rank dies, the launcher sends SIGTERM to the others, and collectives that wait for it fail with
    "connection closed by peer" or an abort. None of this is a cause.

    What proves it: such an error, or the launcher's own signal, after another process had ended.

    When it could be wrong: if every rank only says that it lost a peer, the first failing one is not in sight; its node
    or its log is the missing piece.

    What to do: read the first failing rank instead. With several nodes give `dsdoctor log` the folder with the logs of
    all of them: the rank that says nothing about a lost peer is the one to look at.
    """

    id = "launch/peer-failure"
    severity = "error"
    role = "consequence"
    title = "a rank stopped because another one did"

    def examine(self, case: Case) -> Iterator[Finding]:
        if after_the_work(case):
            return
        proof = [context.evidence(f) for f in context.failures(case) if is_peer_failure(f)]
        ended = list(endings(case))
        if proof or any(not ending.by_launcher for ending in ended) or any(context.failures(case)):
            proof += [ending.evidence for ending in ended if ending.by_launcher]
        if case.logs is not None and (ended or any(context.failures(case))):
            proof += [event.evidence() for event in case.logs.of_kind("peer-lost", "closing-signal")]
            proof += timeouts_as_evidence(case)
        if proof:
            yield self.finding(
                cause="ranks stopped only because another one had gone",
                evidence=tuple(proof[:MAX_EVIDENCE]),
                confidence=0.9,
                fixes=(Fix(text="read the first failing rank instead"),),
            )


DIAGNOSES: tuple[Diagnosis, ...] = (UserException(), PeerFailure())
