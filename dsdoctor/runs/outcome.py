"""What became of a run: joins what each rank wrote with what its attendant and the parent saw. Pure."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from dsdoctor.runs.attendance import Attendance
from dsdoctor.runs.facts import Frame, Outcome, RankRun
from dsdoctor.runs.trace import RankTrace

_TIES = 1.0
"""Seconds by which a death may be noticed later than what it did to the other ranks: the kernel closes a dying
process's sockets before its parent hears of the end."""
_ABORT_DELAY = 5.0
"""An abort is mostly an answer of the communication library to what happened on another rank a moment before."""


Reason = Literal["launcher", "settled", "timeout", "hung", "memory"]


@dataclass(frozen=True, kw_only=True)
class Ended:
    """Why the parent stopped watching, and when (unix seconds). `launcher` means that it ended without us."""

    reason: Reason
    time: float
    launcher_exit: int | None = None
    limit: float = 0.0
    """Seconds that were up, where a time limit ended it."""
    quiet: Mapping[int, float] = field(default_factory=dict)
    """Seconds for which each rank had written nothing by then, where a time limit ended it."""

    @property
    def by_us(self) -> bool:
        return self.reason != "launcher"


def rank_run(trace: RankTrace, seen: Attendance, ended: Ended, stack: tuple[Frame, ...] = ()) -> RankRun:
    """One rank, from its trace and its attendant's notes."""
    by_us = not trace.completed and _was_ended(trace, seen, ended)
    still_there = ended.by_us and (seen.ended is None or seen.ended > ended.time)
    return RankRun(
        rank=trace.rank,
        pid=trace.pid or seen.pid,
        host=trace.host or seen.host,
        exit_code=None if still_there else _exit_code(trace, seen),
        completed=trace.completed,
        ended_by_us=by_us,
        called_engine=trace.called_engine,
        last_phase=trace.last_phase,
        last_step=trace.last_step,
        failure=trace.failure,
        steps=trace.steps,
        stack=stack,
        quiet=ended.quiet.get(trace.rank),
        state=seen.state,
        misuse=trace.misuse,
        first_bad=trace.first_bad,
        frames_report=trace.frames_report,
        patch=trace.patch,
        examined=trace.examined,
    )


def _was_ended(trace: RankTrace, seen: Attendance, ended: Ended) -> bool:
    """True if the rank was told to go or was still there when we ended the run, and had not failed before that."""
    if not seen.began or trace.finish_code is not None:
        return False
    limits = [moment for moment in (seen.told, ended.time if ended.by_us else None) if moment is not None]
    if trace.failure is not None and trace.failure.time is not None:
        return any(moment < trace.failure.time for moment in limits)
    if seen.deserted:
        return True
    return any(seen.ended is None or moment <= seen.ended for moment in limits)


def _exit_code(trace: RankTrace, seen: Attendance) -> int | None:
    """A rank whose attendant vanished without a word went with it by SIGKILL, which alone leaves no time for one."""
    if seen.over:
        return seen.exit_code
    return -signal.SIGKILL if seen.began else trace.finish_code


def troubles(ranks: Sequence[RankRun], traces: Sequence[RankTrace], seen: Sequence[Attendance]) -> list[RankRun]:
    """Ranks that failed by themselves, the first to fail first.

    A script that ends itself has closed its connections a while before its process is gone.
    """
    ended = {each.rank: each.ended for each in seen}
    finished = {trace.rank: trace.finish_time for trace in traces}

    def moment(rank: RankRun) -> float:
        if rank.failure is not None:
            return rank.failure.time or 0.0
        when = finished.get(rank.rank) or ended.get(rank.rank) or 0.0
        if rank.exit_code is None or rank.exit_code >= 0:
            return when
        return when + _ABORT_DELAY if rank.exit_code == -signal.SIGABRT else when - _TIES

    failed = [rank for rank in ranks if not rank.completed and not rank.ended_by_us and _bad(rank)]
    return sorted(failed, key=moment)


def _bad(rank: RankRun) -> bool:
    return rank.failure is not None or rank.exit_code not in (None, 0)


def outcome(ranks: Sequence[RankRun], traces: Sequence[RankTrace], first: RankRun | None, ended: Ended) -> Outcome:
    """The run as a whole; `first` is the first rank that failed by itself."""
    if ended.reason == "memory":
        return "out-of-memory"
    if not any(trace.started for trace in traces) and ended.reason in ("launcher", "settled"):
        return "not-started"
    if first is not None:
        return _of_a_rank(first)
    if ended.reason in ("hung", "timeout"):
        return "hung" if ended.reason == "hung" else "timeout"
    if ended.launcher_exit not in (None, 0) and not all(rank.completed for rank in ranks):
        return "exited"
    return "stopped" if any(trace.stopped for trace in traces) else "finished"


def _of_a_rank(rank: RankRun) -> Outcome:
    if rank.failure is not None:
        return "raised"
    return "killed" if rank.exit_code is not None and rank.exit_code < 0 else "exited"


def why(
    outcome: Outcome,
    first: RankRun | None,
    ended: Ended,
    ranks: Sequence[RankRun],
    tail: str,
    printed: str = "",
) -> str:
    """One sentence to `outcome`.

    `tail` are the last lines of the launcher, `printed` is what `first` said last.
    """
    if outcome == "out-of-memory":
        return "stopped by dsdoctor: host memory was nearly used up, the kernel would have killed a process"
    if outcome == "not-started":
        return f"no rank was started; the launcher said: {tail}" if tail else "no rank was started"
    if first is not None:
        words = f"; it printed last: {printed}" if outcome == "exited" and printed else ""
        return f"rank {first.rank} {_what(first)}{words}"
    if outcome in ("hung", "timeout"):
        waiting = ", ".join(f"rank {rank.rank} {_place(rank)}" for rank in ranks if not rank.completed)
        limit = f"{round(ended.limit, 1):g} s"
        what = f"no progress of any rank for {limit}" if outcome == "hung" else f"not done after {limit}{_made(ranks)}"
        return f"{what}: {waiting or 'all ranks were done, the launcher was not'}"
    if outcome == "exited":
        return f"the launcher ended with exit code {ended.launcher_exit}: {tail}"
    return ""


def _made(ranks: Sequence[RankRun]) -> str:
    steps = max((len(rank.steps) for rank in ranks), default=0)
    return f", {steps} optimizer step{'s' * (steps > 1)} made" if steps else ", no optimizer step made"


def _place(rank: RankRun) -> str:
    if rank.last_phase == "not started":
        return rank.last_phase
    return "in the script" if rank.last_phase == "script" else f"in {rank.last_phase}"


def _what(rank: RankRun) -> str:
    if rank.failure is not None:
        lines = rank.failure.message.strip().splitlines()
        return f"raised {rank.failure.type}: {lines[0]}" if lines else f"raised {rank.failure.type}"
    code = rank.exit_code or 0
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was ended by signal {-code} ({signal.Signals(-code).name})"
    except ValueError:
        return f"was ended by signal {-code}"
