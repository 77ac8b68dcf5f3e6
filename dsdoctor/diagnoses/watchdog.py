"""Timeouts of collectives, compared over the ranks: other calls, rank 0 at work, or nothing that says why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dsdoctor.case import Case
from dsdoctor.diagnoses import context, nodes
from dsdoctor.diagnoses.base import Diagnosis
from dsdoctor.diagnoses.explained import holds
from dsdoctor.diagnoses.forms import MAX_EVIDENCE, Form, TextDiagnosis
from dsdoctor.diagnoses.standing import in_one_round, own_frame, pair_apart, standing, where
from dsdoctor.diagnoses.timeouts import (
    FIRST_COLLECTIVES,
    KEY_NEVER_CAME,
    behind,
    call,
    different,
    moment,
    other_cause,
    silent_ranks,
    timed_out,
    timeouts,
)
from dsdoctor.finding import Finding, Fix
from dsdoctor.logs.facts import LogEvent
from dsdoctor.runs.collectives import apart

_NARROWER = (
    "zero3/generate-hang",
    "zero3/moe-hang",
    "zero3/branch-hang",
    "comm/p2p-hang",
    "comm/rank0-work-timeout",
    "comm/missing-rank",
    "comm/stalled-rank",
    "hang/uneven-batches",
    "launch/world-size-mismatch",
    "version/rank-mismatch",
)
"""What tells more about a timeout than that there was one."""
_SMALL_OPERATIONS = ("ALLREDUCE", "BARRIER", "BROADCAST")
_RANK_0_FIXES = (
    Fix(text="raise the time limit: ddp_timeout in TrainingArguments, or DEEPSPEED_TIMEOUT (minutes)"),
    Fix(text="or prepare the data before the job and only read it on the ranks"),
)


class CollectiveMismatch(TextDiagnosis):
    """Ranks call different collectives, or the same one with different sizes.

    What it is: the order or the shape of collectives depends on the rank: a branch on the rank or on the data, a tensor
    whose length differs, an uneven last batch.

    What proves it: torch's "Detected mismatch between collectives on ranks", the flight recorders of the ranks of a run
    that stands still, watchdog lines of different ranks that
    name the same sequence number with another operation or another number of elements, or the stacks of a run that
    stands still: in one round of the same loop one rank waits in the engine and another one in a collective elsewhere,
    such as `save_checkpoint` under `if rank == 0`.

    When it could be wrong: sequence numbers of different process groups are not comparable.

    What to do: look at the line of your own code in the tracebacks; make sizes equal (pad), or gather objects instead
    (`all_gather_object`). `TORCH_DISTRIBUTED_DEBUG=DETAIL` stops at the first call that differs and names it.
    """

    id = "comm/collective-mismatch"
    severity = "error"
    title = "ranks call different collectives"
    forms = (
        Form(message=r"Detected mismatch between collectives on ranks"),
        Form(message=r"op\.preamble\.length <= op\.nbytes"),
    )
    cause = "ranks call different collectives, or the same one with different sizes"
    fixes = (
        Fix(text="make every rank call the same collectives in the same order with tensors of equal size (pad)"),
        Fix(text="TORCH_DISTRIBUTED_DEBUG=DETAIL names the first one that differs"),
    )

    def examine(self, case: Case) -> Iterator[Finding]:
        yield from nodes.different_calls(self, case)
        if case.logs is not None and holds(case, "zero3/moe-hang", "zero3/branch-hang"):
            return
        pair = different(timeouts(case))
        if pair is None:
            yield from super().examine(case)
            yield from self._in_recorders(case) or self._in_stacks(case)
            return
        if holds(case, "zero3/generate-hang", "hang/uneven-batches"):
            return
        one, other = pair
        yield self.finding(
            cause=f"collective number {one.fields['seq']} is {call(one)} on rank {one.rank} "
            f"and {call(other)} on rank {other.rank}",
            evidence=(one.evidence(), other.evidence()),
            confidence=0.85,
            fixes=self.fixes,
        )

    def _in_recorders(self, case: Case) -> list[Finding]:
        """The flight recorders of a run that stands still show two calls of one number that differ.

        Ranks that are in different rounds (one has left its loop) and those that meet at different places of a model
        under ZeRO-3 differ too; there are narrower names for that.
        """
        run = standing(case)
        found = apart(run.ranks) if run is not None else None
        if run is None or found is None or not found.differ or holds(case, "zero3/branch-hang"):
            return []
        pair = pair_apart(run)
        if pair is not None and not in_one_round(*pair):
            return []
        return [
            self.finding(
                cause=f"rank {found.waits} waits in {found.waiting}, where rank {found.other} called {found.theirs}",
                evidence=tuple(where(run, rank) for rank in run.ranks)[:MAX_EVIDENCE],
                confidence=0.95,
                fixes=self.fixes[:1],
            )
        ]

    def _in_stacks(self, case: Case) -> Iterator[Finding]:
        """One rank called something that the others, in the same round of the same loop, did not call."""
        run = standing(case)
        pair = pair_apart(run) if run is not None else None
        if run is None or pair is None or not in_one_round(*pair):
            return
        waiter, other = pair
        frame = own_frame(other)
        place = f"{frame.file}:{frame.line}: {frame.text}" if frame is not None else "another collective"
        yield self.finding(
            cause=f"rank {other.rank} waits at {place}, which rank {waiter.rank}, in the {waiter.last_phase} of step "
            f"{waiter.last_step}, did not call",
            evidence=tuple(where(run, rank) for rank in run.ranks),
            confidence=0.9,
            fixes=(Fix(text="call it on every rank (save_checkpoint, too), or on none"), *self.fixes[:1]),
        )


class Rank0Work(Diagnosis):
    """All other ranks wait in a tiny collective at the start while rank 0 works alone.

    What it is: rank 0 tokenises or downloads while the others stand at a barrier (`main_process_first`). The barrier
    has the process group's time limit, 30 minutes by default (10 with newer releases), and the work takes longer.

    What proves it: watchdog timeouts of a collective of one element among the first of the job, on every rank but 0,
    before any training step; where torch or gloo names no size, the bars of rank 0 that prepares the data; or, where
    the collective is the very first, ranks that wait for the key by which rank 0 opens the communicator.

    When it could be wrong: rank 0 may also have died or hung there; its own last lines tell.

    What to do: a longer `timeout` for the process group (`ddp_timeout` in TrainingArguments, DEEPSPEED_TIMEOUT), or do
    the work before, and let the ranks only read its result.
    """

    id = "comm/rank0-work-timeout"
    severity = "error"
    title = "the other ranks timed out while rank 0 worked alone"

    def examine(self, case: Case) -> Iterator[Finding]:
        late = timeouts(case)
        if not late:
            yield from self._without_communicator(case)
            yield from self._while_preparing(case)
        if not late or case.logs is None or case.logs.steps_seen or 0 in {event.rank for event in late}:
            return
        prepares = list(case.logs.of_kind("preparing"))
        if not all(_small(event, prepares) for event in late) or other_cause(case):
            return
        minutes = int(late[0].fields["timeout"]) / 60_000
        began = moment(late[0])
        yield self.finding(
            cause=f"every rank but 0 waited {minutes:g} minutes in {call(late[0])} before training, "
            + (f"from {began} on, " if began else "")
            + "while rank 0 worked",
            evidence=tuple(event.evidence() for event in (*late, *prepares[-1:])[:MAX_EVIDENCE]),
            confidence=0.85,
            caveat="Rank 0 may also have hung there; its last lines tell.",
            fixes=_RANK_0_FIXES,
        )

    def _while_preparing(self, case: Case) -> Iterator[Finding]:
        """Ranks that raise at a barrier before training, after rank 0 had shown that it prepares the data."""
        late = timed_out(case)
        prepares = list(case.logs.of_kind("preparing")) if case.logs is not None else []
        raised = [f for f in context.failures(case) if KEY_NEVER_CAME.search(f.message) is None]
        if not late or not prepares or not raised or case.logs is None or case.logs.steps_seen:
            return
        if 0 not in {one.rank for one in late}:
            yield self.finding(
                cause="the other ranks waited in vain before training while rank 0 prepared the data",
                evidence=(*late[:2], prepares[-1].evidence()),
                confidence=0.8,
                caveat="Rank 0 may also have hung there; its last lines tell.",
                fixes=_RANK_0_FIXES,
            )

    def _without_communicator(self, case: Case) -> Iterator[Finding]:
        """Ranks that wait for rank 0 to open the communicator of their first collective."""
        waiting = [(f, m) for f in context.failures(case) for m in [KEY_NEVER_CAME.search(f.message)] if m is not None]
        if not waiting or any(m["rank"] == "0" for _, m in waiting) or other_cause(case):
            return
        yield self.finding(
            cause=f"{len(waiting)} ranks waited for rank 0 to open the first communicator, and it did not come in time",
            evidence=tuple(context.evidence(failure) for failure, _ in waiting)[:MAX_EVIDENCE],
            confidence=0.75,
            caveat="Rank 0 may also have hung or died; its last lines tell.",
            fixes=_RANK_0_FIXES,
        )


class Timeout(Diagnosis):
    """A collective timed out, and nothing in the logs says why.

    What it is: some rank did not come to a collective within its time limit. The cause sits on the rank that is silent
    or behind, and it lies before: the moment is the time of the message minus the time limit.

    What proves it: the watchdog's lines ("Watchdog caught", "timed out in blocking wait", what it prints after them, or
    that it got stuck itself), or gloo's "Timed out waiting". No rank raised an exception of its own.

    When it could be wrong: 100 % use of the GPU during a hang is NCCL spinning, no work. A log that lacks a node lacks
    its cause.

    What to do: look at the log of the silent rank at that moment. The next time take stacks of all ranks while it hangs
    (`py-spy dump --pid PID`), or let torch record: `TORCH_NCCL_TRACE_BUFFER_SIZE=2000 TORCH_NCCL_DUMP_ON_TIMEOUT=1`,
    read by `torchfrtrace`. `dsdoctor triage` takes the stacks by itself. A longer time limit helps only where the work
    really takes longer.
    """

    id = "comm/timeout"
    severity = "error"
    title = "a collective timed out"

    def examine(self, case: Case) -> Iterator[Finding]:
        late = timeouts(case)
        proof = timed_out(case)
        if not proof or different(late) or holds(case, *_NARROWER):
            return
        silent = silent_ranks(case.logs, proof) if case.logs is not None else ()
        who = f"; rank {silent[0]} says nothing" if len(silent) == 1 else ""
        what = f"{call(late[0])}, number {late[0].fields['seq']}," if late else "a collective"
        ranks = len({one.rank for one in proof})
        apart_in_count = behind(case)
        if apart_in_count is not None:
            least, most = apart_in_count
            few, many = least.fields["enqueued"], most.fields["enqueued"]
            who = f"; rank {least.rank} is behind: it had called {few} collectives, rank {most.rank} {many}"
            proof = (*proof[:2], least.evidence(), most.evidence())
        yield self.finding(
            cause=f"{what} timed out on {ranks} rank{'s' if ranks > 1 else ''}{who}" + _since(late),
            evidence=proof[:MAX_EVIDENCE],
            confidence=0.7,
            caveat="The logs do not say why; the cause lies one time limit before these lines, on the silent rank.",
            fixes=(
                Fix(text="look at the silent rank's own log, and at what happened one time limit before these lines"),
                Fix(text="take stacks of all ranks while it hangs (py-spy dump --pid PID)"),
            ),
        )


def _small(event: LogEvent, prepares: Sequence[LogEvent]) -> bool:
    """One of the first collectives, of one element; releases that print no size need the sight of rank 0's work."""
    if int(event.fields["seq"]) > FIRST_COLLECTIVES:
        return False
    if "numel" in event.fields:
        return int(event.fields["numel"]) <= 1
    return bool(prepares) and event.fields["op"] in _SMALL_OPERATIONS


def _since(late: Sequence[LogEvent]) -> str:
    began = moment(late[0]) if late else ""
    return f"; it began to wait at {began}, and that is the moment to look at" if began else ""


DIAGNOSES: tuple[Diagnosis, ...] = (CollectiveMismatch(), Rank0Work(), Timeout())
