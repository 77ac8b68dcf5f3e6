"""Runs that stand still: which rank the others wait for, and whether it has less to do or is stuck."""

from __future__ import annotations

from collections.abc import Iterator

from dsdoctor.case import Case
from dsdoctor.diagnoses.base import Diagnosis
from dsdoctor.diagnoses.uneven import batches, fewest_and_most
from dsdoctor.diagnoses.watchdog import timed_out
from dsdoctor.finding import Evidence, Finding, Fix
from dsdoctor.runs.facts import Frame, RankRun, Run

_ENGINE_PHASES = ("forward", "backward", "step")
_EQUAL_BATCHES = (
    Fix(text="give every rank the same number of batches: drop_last=True, DistributedSampler, equal shards"),
    Fix(text="or agree on the end: all-reduce (MIN) a flag 'I have a batch' before each step, stop together"),
)


class UnevenBatches(Diagnosis):
    """Ranks run different numbers of steps, so one rank waits for ever in a reduction that no other rank joins.

    What proves it: a run stood still (or a rank waited until the others were gone), one rank has left its training loop
    (it ended, or it waits in a collective of the script's own) after fewer optimizer steps than the rank that waits
    inside the engine. Every rank's own stack and step count is in the evidence.

    When it could be wrong: a rank that left its loop for another reason, such as an exception that the script
    swallowed, looks the same; its output says so. A rank that is only slow is not meant here.

    What to do: give every rank the same number of batches (`drop_last=True`, a `DistributedSampler`, shards of equal
    length), or stop all ranks as soon as the first one has no batch left.
    """

    id = "hang/uneven-batches"
    severity = "error"
    title = "ranks run different numbers of steps"

    def examine(self, case: Case) -> Iterator[Finding]:
        yield from self._in_logs(case)
        run = _standing(case)
        if run is None:
            return
        waiting = [rank for rank in run.ranks if rank.last_phase in _ENGINE_PHASES]
        left = [rank for rank in run.ranks if rank.completed or (rank.last_phase == "script" and _in_collective(rank))]
        pairs = [
            (w, e) for w in waiting for e in left if len(e.steps) < w.last_step + 1 and w.last_step >= len(e.steps)
        ]
        if not pairs:
            return
        waiter, early = pairs[0]
        yield self.finding(
            cause=(
                f"rank {early.rank} left its training loop after {len(early.steps)} steps while rank {waiter.rank} "
                f"is in the {waiter.last_phase} of step {waiter.last_step} and waits for it"
            ),
            evidence=tuple(_where(run, rank) for rank in run.ranks),
            confidence=0.9,
            caveat="A rank that left its loop after an exception of its own that the script swallowed looks the same.",
            fixes=_EQUAL_BATCHES,
        )

    def _in_logs(self, case: Case) -> Iterator[Finding]:
        """Ranks of a log that said how many batches they have, and then timed out waiting for each other."""
        late = timed_out(case)
        ends = fewest_and_most(case.logs) if case.logs is not None and late else None
        if ends is None:
            return
        fewest, most = ends
        yield self.finding(
            cause=f"rank {fewest.rank} has {batches(fewest)} batches and rank {most.rank} has {batches(most)}, "
            "and a collective timed out",
            evidence=(fewest.evidence(), most.evidence(), *late[:2]),
            confidence=0.85,
            fixes=_EQUAL_BATCHES,
        )


class StalledRank(Diagnosis):
    """One rank stands still in code of its own while the others wait for it in a collective.

    What proves it: no rank made progress for the stall limit; the stacks show the other ranks inside the engine or a
    collective, and this one in a line that is none of these: a sleep, a lock, a read, an endless loop.

    When it could be wrong: a rank that does long work (tokenising, writing a checkpoint to a slow disk) with no step in
    between is only slow; a longer `--stall` tells.

    What to do: read the line that the stack shows; work that only one rank does belongs before the process group is
    made, or behind a barrier with a time-out that is long enough.
    """

    id = "hang/stalled-rank"
    severity = "error"
    title = "a rank stands still while the others wait for it"

    def examine(self, case: Case) -> Iterator[Finding]:
        run = _standing(case)
        if run is None or run.outcome == "finished":
            return
        stuck = [rank for rank in run.ranks if rank.stack and not _in_collective(rank) and not rank.completed]
        if not stuck:
            return
        first = stuck[0]
        frame = _own_frame(first)
        place = f"{frame.file}:{frame.line} in {frame.function}" if frame else "an unknown place"
        alone = len(stuck) == len(run.ranks)
        who = "every rank stands" if alone and len(stuck) > 1 else f"rank {first.rank} stands"
        yield self.finding(
            cause=f"{who} still at {place}" + (f": {frame.text}" if frame and frame.text else ""),
            evidence=tuple(_where(run, rank) for rank in run.ranks),
            confidence=0.6 if alone and len(stuck) > 1 else 0.85,
            caveat="A rank that is busy with long work between two steps looks the same; a longer --stall tells.",
            fixes=(Fix(text=f"look at {place}; if it is long work, run it before training or raise --stall"),),
        )


def _standing(case: Case) -> Run | None:
    """The run with the given config, if it stood still, or if one rank waited until the others were gone."""
    run = case.run("with-deepspeed")
    if run is None or len(run.ranks) < 1:
        return None
    if run.outcome in ("hung", "timeout"):
        return run
    done = [rank.completed for rank in run.ranks]
    orphaned = any(done) and not all(done) and not any(_own_failure(rank) for rank in run.ranks)
    return run if orphaned else None


def _own_failure(rank: RankRun) -> bool:
    """An exception that is not just a connection closed by a rank that is gone."""
    if rank.failure is None:
        return False
    words = rank.failure.message.lower()
    return not any(mark in words for mark in ("closed by peer", "connection reset", "broken pipe", "gloo", "nccl"))


def _in_collective(rank: RankRun) -> bool:
    """Its stack goes through torch.distributed or DeepSpeed's communication."""
    return any(
        "distributed_c10d" in f.file or "/deepspeed/comm/" in f.file or "/deepspeed/" in f.file for f in rank.stack
    )


def _own_frame(rank: RankRun) -> Frame | None:
    """The innermost frame that is not in an installed package, else the innermost."""
    own = [f for f in rank.stack if "site-packages" not in f.file and "/lib/python" not in f.file]
    return own[-1] if own else (rank.stack[-1] if rank.stack else None)


def _where(run: Run, rank: RankRun) -> Evidence:
    frame = _own_frame(rank)
    stands = f", at {frame.file}:{frame.line} in {frame.function}: {frame.text}".rstrip(": ") if frame else ""
    state = "ended" if rank.completed else f"in {rank.last_phase}"
    text = f"{len(rank.steps)} steps done, {state}{stands}"
    return Evidence(source=run.leg, rank=rank.rank, step=rank.last_step, text=text)


DIAGNOSES: tuple[Diagnosis, ...] = (UnevenBatches(), StalledRank())
