"""Timeouts of collectives and errors of the network as the ranks' own words tell them, compared over the ranks."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from dsdoctor.case import Case
from dsdoctor.diagnoses import before_run, context
from dsdoctor.diagnoses.base import Diagnosis
from dsdoctor.diagnoses.explained import holds
from dsdoctor.diagnoses.forms import MAX_EVIDENCE, Form, TextDiagnosis
from dsdoctor.diagnoses.peers import is_peer_failure
from dsdoctor.diagnoses.standing import in_one_round, own_frame, pair_apart, standing, where
from dsdoctor.finding import Evidence, Finding, Fix
from dsdoctor.logs.facts import LogEvent, LogFacts
from dsdoctor.runs.collectives import apart

FIRST_COLLECTIVES = 10
"""A SeqNum up to this is one of the first collectives of a job, before training."""
IB_TIMEOUT = "12"
VIRTUAL = re.compile(r"\[0\](?:docker|br-|virbr|veth|lo\b|cni|flannel|cali|tun|tap)")
KEY_NEVER_CAME = re.compile(
    r"\[(?P<rank>\d+)\] is setting up NCCL .*got error: (?:Timeout waiting|wait timeout|Socket Timeout)"
)
"""What a rank raises that waits for rank 0 to open the first communicator."""
_TIMED_OUT = re.compile(rf"collective operation timeout|Timed out waiting \d+ms|{KEY_NEVER_CAME.pattern}")
_NARROWER = (
    "zero3/generate-hang",
    "zero3/moe-hang",
    "zero3/branch-hang",
    "comm/p2p-hang",
    "comm/rank0-work-timeout",
    "hang/uneven-batches",
    "launch/world-size-mismatch",
    "version/rank-mismatch",
)
"""What tells more about a timeout than that there was one."""
_GATHERS = ("ALLGATHER", "_ALLGATHER_BASE", "REDUCE_SCATTER", "_REDUCE_SCATTER_BASE")
_RANK_0_FIXES = (
    Fix(text="raise the time limit: ddp_timeout in TrainingArguments, or DEEPSPEED_TIMEOUT (minutes)"),
    Fix(text="or prepare the data before the job and only read it on the ranks"),
)
_CAUSES_OF_HANGS = ("device-assert", "gpu-fault", "ib-completion", "connect-failed", "oom-kill")


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

    What to do: look at the line of your own code in the tracebacks; make sizes equal (pad), or gather objects instead.
    """

    id = "comm/collective-mismatch"
    severity = "error"
    title = "ranks call different collectives"
    forms = (Form(message=r"Detected mismatch between collectives on ranks"),)
    cause = "ranks call different collectives, or the same one with different sizes"
    fixes = (
        Fix(text="make every rank call the same collectives in the same order with tensors of equal size (pad)"),
        Fix(text="TORCH_DISTRIBUTED_DEBUG=DETAIL names the first one that differs"),
    )

    def examine(self, case: Case) -> Iterator[Finding]:
        pair = _different(timeouts(case))
        if pair is None:
            yield from super().examine(case)
            yield from self._in_recorders(case) or self._in_stacks(case)
            return
        if holds(case, "zero3/generate-hang"):
            return
        one, other = pair
        yield self.finding(
            cause=f"collective number {one.fields['seq']} is {_call(one)} on rank {one.rank} "
            f"and {_call(other)} on rank {other.rank}",
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
    before any training step; or, where that is the very first, ranks that wait for the key by which rank 0 opens the
    communicator.

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
        if not late or case.logs is None or case.logs.steps_seen or 0 in {event.rank for event in late}:
            return
        tiny = all(int(e.fields.get("numel", "2")) <= 1 and int(e.fields["seq"]) <= FIRST_COLLECTIVES for e in late)
        if not tiny or _other_cause(case):
            return
        minutes = int(late[0].fields["timeout"]) / 60_000
        yield self.finding(
            cause=f"every rank but 0 waited {minutes:g} minutes in {_call(late[0])} before training, while rank 0 "
            "worked",
            evidence=tuple(event.evidence() for event in late[:MAX_EVIDENCE]),
            confidence=0.85,
            caveat="Rank 0 may also have hung there; its last lines tell.",
            fixes=_RANK_0_FIXES,
        )

    def _without_communicator(self, case: Case) -> Iterator[Finding]:
        """Ranks that wait for rank 0 to open the communicator of their first collective."""
        waiting = [(f, m) for f in context.failures(case) for m in [KEY_NEVER_CAME.search(f.message)] if m is not None]
        if not waiting or any(m["rank"] == "0" for _, m in waiting) or _other_cause(case):
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

    What proves it: the watchdog's lines, or gloo's "Timed out waiting". No rank raised an exception of its own.

    When it could be wrong: 100 % use of the GPU during a hang is NCCL spinning, no work. A log that lacks a node lacks
    its cause.

    What to do: stacks of the ranks (`py-spy dump`) while it hangs; TORCH_NCCL_TRACE_BUFFER_SIZE for the flight
    recorder; the log of the silent rank.
    """

    id = "comm/timeout"
    severity = "error"
    title = "a collective timed out"

    def examine(self, case: Case) -> Iterator[Finding]:
        late = timeouts(case)
        proof = timed_out(case)
        if not proof or _different(late) or holds(case, *_NARROWER):
            return
        silent = silent_ranks(case.logs, proof) if case.logs is not None else ()
        who = f"; rank {silent[0]} says nothing" if len(silent) == 1 else ""
        what = f"{_call(late[0])}, number {late[0].fields['seq']}," if late else "a collective"
        ranks = len({one.rank for one in proof})
        yield self.finding(
            cause=f"{what} timed out on {ranks} rank{'s' if ranks > 1 else ''}{who}",
            evidence=proof[:MAX_EVIDENCE],
            confidence=0.7,
            caveat="The logs do not say why; the cause lies one time limit before these lines, on the silent rank.",
            fixes=(
                Fix(text="look at the silent rank's own log, and at what happened one time limit before these lines"),
                Fix(text="take stacks of all ranks while it hangs (py-spy dump --pid PID)"),
            ),
        )


class InfinibandError(Diagnosis):
    """An InfiniBand transfer failed.

    What it is: NCCL got a completion with an error from the network card. Status 12 means that the other side did not
    answer after all retries; status 5 only that a request was flushed because the connection had gone already.

    What proves it: "NET/IB : Got completion ... with status=N".

    When it could be wrong: with status 5 alone the first failure is on the peer; a peer that died for another reason
    gives status 12, too: read its log.

    What to do: check the link (ibstat, counters), GID index, MTU and firewall between the two hosts of the message.
    """

    id = "comm/ib-error"
    severity = "error"
    title = "an InfiniBand transfer failed"

    def examine(self, case: Case) -> Iterator[Finding]:
        completions = list(case.logs.of_kind("ib-completion")) if case.logs is not None else []
        first = [event for event in completions if event.fields.get("status") == IB_TIMEOUT]
        flushed = [event for event in completions if event not in first]
        if not completions or any(not is_peer_failure(failure) for failure in context.failures(case)):
            return
        chosen = [*first, *flushed]
        status = chosen[0].fields.get("status")
        what = "the peer did not answer after all retries" if first else "a request was flushed, the peer had gone"
        yield self.finding(
            cause=f"InfiniBand completion with status {status}: {what}",
            evidence=tuple(event.evidence() for event in chosen[:MAX_EVIDENCE]),
            confidence=0.9 if first else 0.6,
            caveat="A peer that died for another reason looks the same; read its log.",
            fixes=(Fix(text="check link, GID index, MTU and firewall between the two hosts that the message names"),),
        )


class WrongInterface(Diagnosis):
    """NCCL uses a network interface that leads nowhere.

    What it is: without NCCL_SOCKET_IFNAME, NCCL takes the first interface it finds, which may be docker0 or another
    bridge. Its address exists on every host and none can be reached by it.

    What proves it: such an interface comes first in "NET/Socket : Using", and connecting to an address failed.

    When it could be wrong: several nodes on one host really can talk over a bridge; then connecting does not fail.

    What to do: `NCCL_SOCKET_IFNAME` (and `GLOO_SOCKET_IFNAME`) with the interface that joins the nodes, or exclude the
    bridges with `^docker0,br-`.
    """

    id = "comm/wrong-interface"
    severity = "error"
    title = "NCCL uses an interface that leads nowhere"

    def examine(self, case: Case) -> Iterator[Finding]:
        if case.logs is None:
            return
        virtual = [e for e in case.logs.of_kind("nccl-interface") if VIRTUAL.match(e.fields.get("interfaces", ""))]
        failed = list(case.logs.of_kind("connect-failed"))
        if not virtual or not failed:
            return
        name = virtual[0].fields["interfaces"].partition(":")[0].partition("]")[2]
        yield self.finding(
            cause=f"NCCL chose {name}, and connecting to {failed[0].fields.get('address')} failed",
            evidence=(failed[0].evidence(), virtual[0].evidence()),
            confidence=0.92,
            fixes=(Fix(text="set NCCL_SOCKET_IFNAME (and GLOO_SOCKET_IFNAME) to the interface that joins the nodes"),),
        )


class MoeHang(Diagnosis):
    """ZeRO-3 with experts hangs because ranks route tokens to different experts.

    What it is: ZeRO-3 gathers the parameters of a module when it runs. If a rank has no token for an expert, it does
    not run it, and the others wait in the gather for ever.

    What proves it: stage 3, a model with experts, no leaf modules, and a timeout in a gather; before a run the config
    and the model's config.json, as a warning.

    When it could be wrong: any other branch that depends on the data hangs alike.

    What to do: make the whole block of experts a leaf module, so that all its parameters are gathered together.
    """

    id = "zero3/moe-hang"
    severity = "error"
    title = "experts under ZeRO-3 without leaf modules"

    def examine(self, case: Case) -> Iterator[Finding]:
        yield from before_run.experts_without_leaves(self, case)
        logs = case.logs
        late = gather_timeouts(case)
        if logs is None or not late or any(logs.of_kind("leaf-modules")):
            return
        experts = list(logs.of_kind("experts"))
        if not experts:
            return
        proof = [*logs.of_kind("trace-invalidated"), *late[:2], *experts[:1]]
        yield self.finding(
            cause="a model with experts under ZeRO-3 and no leaf modules timed out in a gather of parameters",
            evidence=tuple(event.evidence() for event in proof[:MAX_EVIDENCE]),
            confidence=0.85,
            fixes=(Fix(text="make the block of experts a leaf module: set_z3_leaf_modules(model, [MoeBlock])"),),
            keys=("zero_optimization.stage", "zero_optimization.leaf_module"),
        )


def timeouts(case: Case) -> list[LogEvent]:
    """The watchdog's lines, one a rank and collective."""
    return list(case.logs.of_kind("watchdog")) if case.logs is not None else []


def _different(late: Sequence[LogEvent]) -> tuple[LogEvent, LogEvent] | None:
    """Two ranks that name the same collective otherwise."""
    first: dict[str, LogEvent] = {}
    for event in late:
        other = first.setdefault(event.fields["seq"], event)
        if other.rank != event.rank and _call(other) != _call(event):
            return other, event
    return None


def _call(event: LogEvent) -> str:
    numel = event.fields.get("numel")
    return event.fields["op"] + (f" of {numel} elements" if numel else "")


def silent_ranks(logs: LogFacts, late: Sequence[LogEvent | Evidence]) -> tuple[int, ...]:
    """Ranks that are known of and that did not report the timeout."""
    known = {*logs.ranks, *(exit.rank for exit in logs.exits if exit.rank is not None)}
    known |= set(range(max((one.rank or 0 for one in late), default=0) + 1))
    return tuple(sorted(known - {one.rank for one in late}))


def _other_cause(case: Case) -> bool:
    """True if something else happened that a timeout would only follow."""
    if any(not is_peer_failure(failure) for failure in context.failures(case)):
        return True
    return case.logs is not None and any(case.logs.of_kind(*_CAUSES_OF_HANGS))


def gather_timeouts(case: Case) -> list[LogEvent]:
    """Timeouts in the gathers of ZeRO-3 that nothing else explains."""
    if context.stage(case) != 3 or _other_cause(case):
        return []
    return [event for event in timeouts(case) if event.fields["op"] in _GATHERS]


def timed_out(case: Case) -> tuple[Evidence, ...]:
    """The lines that say that a collective timed out; empty if something else went wrong that it would only follow."""
    if _other_cause(case):
        return ()
    raised = (failure for failure in context.failures(case) if _TIMED_OUT.search(failure.message))
    return tuple(event.evidence() for event in timeouts(case)) or tuple(map(context.evidence, raised))


def timeouts_as_evidence(case: Case) -> list[Evidence]:
    """The watchdog's lines where they only follow another failure."""
    return [event.evidence() for event in timeouts(case)] if _other_cause(case) else []


DIAGNOSES: tuple[Diagnosis, ...] = (
    CollectiveMismatch(),
    Rank0Work(),
    MoeHang(),
    InfinibandError(),
    WrongInterface(),
    Timeout(),
)
