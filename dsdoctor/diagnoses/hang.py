"""Runs that stand still: which rank the others wait for, and whether it has less to do or is stuck."""

from __future__ import annotations

from collections.abc import Iterator

from dsdoctor.case import Case
from dsdoctor.diagnoses.base import Diagnosis
from dsdoctor.diagnoses.standing import in_collective, in_one_round, own_frame, pair_apart, standing, where
from dsdoctor.diagnoses.timeouts import timed_out
from dsdoctor.diagnoses.uneven import batches, fewest_and_most
from dsdoctor.finding import Finding, Fix
from dsdoctor.frames import passes_through
from dsdoctor.runs.facts import RankRun, Run

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
        run = standing(case)
        if run is None:
            return
        pair = pair_apart(run)
        if pair is None or in_one_round(*pair):
            return
        waiter, early = pair
        yield self.finding(
            cause=(
                f"rank {early.rank} left its training loop after {len(early.steps)} steps while rank {waiter.rank} "
                f"is in the {waiter.last_phase} of step {waiter.last_step} and waits for it"
            ),
            evidence=tuple(where(run, rank) for rank in run.ranks),
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
    collective, and this one in a line that is none of these: a sleep, a lock, a read, an endless loop. Or the kernel
    says that its process is stopped, so that it cannot even show its stack.

    When it could be wrong: a rank that does long work (tokenising, writing a checkpoint to a slow disk) with no step in
    between is only slow; a longer `--stall` tells.

    What to do: read the line that the stack shows; work that only one rank does belongs before the process group is
    made, or behind a barrier with a time-out that is long enough.
    """

    id = "hang/stalled-rank"
    severity = "error"
    title = "a rank stands still while the others wait for it"

    def examine(self, case: Case) -> Iterator[Finding]:
        run = standing(case)
        if run is None or run.outcome == "finished":
            return
        stopped = next((rank for rank in run.ranks if rank.state == "T"), None)
        if stopped is not None:
            yield self._stopped(run, stopped)
            return
        stuck = [
            rank
            for rank in run.ranks
            if rank.stack and not in_collective(rank) and not rank.completed and not _waits_for_its_own(rank)
        ]
        if not stuck:
            return
        first = stuck[0]
        frame = own_frame(first)
        place = f"{frame.file}:{frame.line} in {frame.function}" if frame else "an unknown place"
        alone = len(stuck) == len(run.ranks)
        who = "every rank" if alone and len(stuck) > 1 else f"rank {first.rank}"
        does = "is busy at" if first.moved else "stands still at"
        yield self.finding(
            cause=f"{who} {does} {place}" + (f": {frame.text}" if frame and frame.text else ""),
            evidence=tuple(where(run, rank) for rank in run.ranks),
            confidence=0.6 if alone and len(stuck) > 1 else 0.85,
            caveat="A rank that is busy with long work between two steps looks the same; a longer --stall tells.",
            fixes=(Fix(text=f"look at {place}; if it is long work, run it before training or raise --stall"),),
        )

    def _stopped(self, run: Run, rank: RankRun) -> Finding:
        return self.finding(
            cause=f"the process of rank {rank.rank} is stopped, by a signal (SIGSTOP, Ctrl-Z) or a debugger",
            evidence=tuple(where(run, each) for each in run.ranks),
            confidence=0.9,
            fixes=(Fix(text="let it go on (kill -CONT), or find out what stops it"),),
        )


class OwnRanks(Diagnosis):
    """The script starts ranks of its own, inside each rank that the launcher started.

    What it is: `torch.multiprocessing.spawn` in a script that is meant to be started by `python train.py`. Under a
    launcher every rank spawns a whole job, and under torchrun the spawned ranks look for torchrun's store at the
    address that the script gave them, where nobody listens.

    What proves it: a run that stood still with a rank inside `torch.multiprocessing.spawn`.

    When it could be wrong: the spawned processes may be workers for the data, and what they wait for something else.

    What to do: dsdoctor starts a script by a launcher, as DeepSpeed wants it. Give the script a way to run as one rank
    (call the worker with RANK and WORLD_SIZE of the environment), and start it with torchrun or deepspeed.
    """

    id = "launch/own-ranks"
    severity = "error"
    title = "the script starts ranks of its own"

    def examine(self, case: Case) -> Iterator[Finding]:
        run = standing(case)
        spawning = [rank for rank in run.ranks if _waits_for_its_own(rank)] if run is not None else []
        if run is None or not spawning:
            return
        yield self.finding(
            cause=f"rank {spawning[0].rank} waits for processes that it started by torch.multiprocessing.spawn, inside "
            "a job that a launcher had started already; what goes on in them is not seen",
            evidence=tuple(where(run, rank) for rank in run.ranks),
            confidence=0.8,
            fixes=(Fix(text="let the script run as one rank (RANK, WORLD_SIZE of the environment), and start it so"),),
        )


def _waits_for_its_own(rank: RankRun) -> bool:
    return not rank.completed and passes_through(rank.stack, r"torch[/\\]multiprocessing[/\\]spawn\.py")


DIAGNOSES: tuple[Diagnosis, ...] = (UnevenBatches(), StalledRank(), OwnRanks())
