"""A run that stands still: who waits inside the engine, who is elsewhere, and where each rank's own code stands."""

from __future__ import annotations

from dsdoctor.case import Case
from dsdoctor.finding import Evidence
from dsdoctor.runs.facts import Frame, RankRun, Run

ENGINE_PHASES = ("forward", "backward", "step")


def pair_apart(run: Run) -> tuple[RankRun, RankRun] | None:
    """A rank that waits inside the engine, and one that ended or waits in a collective of its own after fewer steps."""
    waiting = [rank for rank in run.ranks if rank.last_phase in ENGINE_PHASES]
    away = [rank for rank in run.ranks if left(rank) or (rank.last_phase == "script" and in_collective(rank))]
    return next(((w, a) for w in waiting for a in away if w.last_step >= len(a.steps)), None)


def apart_in_engine(run: Run) -> tuple[RankRun, RankRun] | None:
    """Two ranks that wait for others inside the engine, at different places of the same step."""
    inside = [rank for rank in run.ranks if rank.last_phase in ENGINE_PHASES and in_collective(rank)]
    if len(inside) < len(run.ranks):
        return None
    pairs = ((one, other) for one in inside for other in inside if one.rank < other.rank)
    return next((pair for pair in pairs if _apart(*pair)), None)


def _apart(one: RankRun, other: RankRun) -> bool:
    mine, theirs = own_frame(one), own_frame(other)
    return one.last_step == other.last_step and (one.last_phase != other.last_phase or mine != theirs)


def in_one_round(one: RankRun, other: RankRun) -> bool:
    """Both stand in the same loop: their stacks part at two lines of one function inside the innermost loop there."""
    for mine, theirs in zip(one.stack, other.stack, strict=False):
        if (mine.file, mine.function) != (theirs.file, theirs.function):
            return False
        if mine.line != theirs.line:
            return bool(mine.loops) and mine.loops[0] in theirs.loops
    return False


def standing(case: Case) -> Run | None:
    """The run with the given config, if it stood still, or if one rank waited until the others were gone.

    A run that its time limit ended stood still only if no rank had given a sign for the stall limit; what prints or
    trains may only be slow.
    """
    run = case.run("with-deepspeed")
    if run is None or len(run.ranks) < 1:
        return None
    if run.outcome == "timeout":
        return run if all(left(rank) or _silent(rank, run) for rank in run.ranks) else None
    if run.outcome == "hung":
        return run
    done = [left(rank) for rank in run.ranks]
    orphaned = any(done) and not all(done) and not any(_own_failure(rank) for rank in run.ranks)
    return run if orphaned else None


def left(rank: RankRun) -> bool:
    """It ended by itself and without an error: it had done its work, or the script ended it (`os._exit(0)`)."""
    return rank.completed or (rank.exit_code == 0 and not rank.ended_by_us and rank.failure is None)


def _silent(rank: RankRun, run: Run) -> bool:
    return rank.quiet is not None and rank.quiet >= run.stall_limit


def _own_failure(rank: RankRun) -> bool:
    """An exception that is not just a connection closed by a rank that is gone."""
    if rank.failure is None:
        return False
    words = rank.failure.message.lower()
    return not any(mark in words for mark in ("closed by peer", "connection reset", "broken pipe", "gloo", "nccl"))


def in_collective(rank: RankRun) -> bool:
    """It waits for others: in a collective that its flight recorder shows as unfinished (NCCL's run on the GPU, and the
    stack stands at whatever needs the GPU next), or its stack goes through torch.distributed or DeepSpeed.
    """
    return any(not call.finished for call in rank.collectives) or any(
        "distributed_c10d" in f.file or "/deepspeed/comm/" in f.file or "/deepspeed/" in f.file for f in rank.stack
    )


def own_frame(rank: RankRun) -> Frame | None:
    """The innermost frame that is not in an installed package, else the innermost."""
    own = [f for f in rank.stack if "site-packages" not in f.file and "/lib/python" not in f.file]
    return own[-1] if own else (rank.stack[-1] if rank.stack else None)


def _in_recorder(rank: RankRun) -> str:
    """The collective that it waits in, or else the last one that it called."""
    waiting = next((call for call in rank.collectives if not call.finished), None)
    if waiting is not None:
        return f"; it waits in {waiting}"
    return f"; its last collective was {rank.collectives[-1]}" if rank.collectives else ""


def where(run: Run, rank: RankRun) -> Evidence:
    frame = own_frame(rank)
    stands = f", at {frame.file}:{frame.line} in {frame.function}: {frame.text}".rstrip(": ") if frame else ""
    state = "ended" if left(rank) else "stopped" if rank.state == "T" else f"in {rank.last_phase}"
    text = f"{len(rank.steps)} steps done, {state}{stands}{_in_recorder(rank)}"
    return Evidence(source=run.leg, rank=rank.rank, step=rank.last_step, text=text)
