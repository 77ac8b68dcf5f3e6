"""How the processes of a job ended, from its run or its logs alike, and whether memory was the reason."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from dsdoctor.case import Case
from dsdoctor.diagnoses import context
from dsdoctor.finding import Evidence
from dsdoctor.logs.facts import LogFacts, ProcessExit
from dsdoctor.runs.facts import Run

SIGTERM = -15
KILL = -9
SEGMENTATION_FAULT = -11
ABORT = -6
_DONE = re.compile(r"train_runtime|raining (?:finished|complete|done)")
_SHELL_SIGNAL = 128
_RUNNER_SIGNAL = 256
NEARLY_FULL = 0.05
PLENTY = 0.2
"""Shares of the memory (what the ranks had and what was left) that count as nearly full and as plenty."""


@dataclass(frozen=True, kw_only=True)
class Ending:
    """One process that did not end well. `code` is negative for a signal; `by_launcher` was stopped as a follower."""

    rank: int | None
    code: int
    evidence: Evidence
    by_launcher: bool = False

    @property
    def who(self) -> str:
        return f"rank {self.rank}" if self.rank is not None else "a process"


@dataclass(frozen=True, kw_only=True)
class MemoryVerdict:
    """Whether a kill was for lack of host memory, and what says so."""

    out_of_memory: bool
    confidence: float
    text: str


def signal_code(code: int) -> int:
    """The code with signals made negative: a shell says 128 + signal, the `deepspeed` command 256 - signal."""
    if _SHELL_SIGNAL < code < _SHELL_SIGNAL + 32:
        return _SHELL_SIGNAL - code
    return code - _RUNNER_SIGNAL if _RUNNER_SIGNAL - 32 < code < _RUNNER_SIGNAL else code


def endings(case: Case) -> Iterator[Ending]:
    """The processes of the job that ended with a failure; those of its run first."""
    run = context.own_run(case)
    if run is not None:
        yield from _of_run(run)
    if case.logs is not None:
        yield from (_of_log(exit, case.logs) for exit in case.logs.exits)


def after_the_work(case: Case) -> bool:
    """True if the script says that training was done before processes aborted, and nothing else went wrong."""
    if case.logs is None or any(signal_code(exit.code) not in (0, ABORT, SIGTERM) for exit in case.logs.exits):
        return False
    done = [event.order for event in case.logs.of_kind("finished") if _DONE.search(event.text) is not None]
    return bool(done) and bool(case.logs.exits) and min(done) < min(exit.order for exit in case.logs.exits)


def memory_verdict(run: Run) -> MemoryVerdict | None:
    """What the counters and the memory curve of a run say about a kill in it; None if it has neither."""
    ranks = {rank.pid for rank in run.ranks if rank.exit_code == KILL}
    named = next((kill for kill in run.kernel_kills if kill.pid in ranks), None)
    if named is not None:
        return MemoryVerdict(out_of_memory=True, confidence=0.98, text=f"the kernel's log: {named.text}")
    if run.oom_kills > 0:
        text = f"the kernel's counter of out-of-memory kills grew by {run.oom_kills} during the run"
        return MemoryVerdict(out_of_memory=True, confidence=0.95, text=text)
    if not run.memory:
        text = "the counter of out-of-memory kills did not move"
        return MemoryVerdict(out_of_memory=False, confidence=0.5, text=text)
    least = min(run.memory, key=lambda sample: sample.available_bytes)
    share = least.available_bytes / max(1, least.available_bytes + least.ranks_bytes)
    left = f"at least {least.available_bytes / 2**30:.1f} GiB of host memory were left ({share:.0%})"
    if share < NEARLY_FULL:
        return MemoryVerdict(out_of_memory=True, confidence=0.75, text=f"{left}, seconds before the end")
    confidence = 0.85 if share > PLENTY else 0.6
    return MemoryVerdict(
        out_of_memory=False, confidence=confidence, text=f"no out-of-memory kill was counted and {left}"
    )


def memory_curve(run: Run, points: int = 6) -> str:
    """What was left of the host's memory over the run, at a few moments of it; empty where it was not watched."""
    if not run.memory:
        return ""
    last = len(run.memory) - 1
    chosen = sorted({round(last * index / (points - 1)) for index in range(points)})
    told = ", ".join(
        f"{run.memory[at].available_bytes / 2**30:.2f} GiB at {run.memory[at].seconds:.0f} s" for at in chosen
    )
    return f"host memory left: {told}; the run's processes held {run.memory[last].ranks_bytes / 2**30:.2f} GiB"


def _of_run(run: Run) -> Iterator[Ending]:
    for rank in run.ranks:
        if rank.exit_code is None or rank.exit_code == 0 or rank.completed or rank.ended_by_us:
            continue
        text = (
            f"rank {rank.rank} ended with exit code {rank.exit_code} in phase {rank.last_phase}, step {rank.last_step}"
        )
        yield Ending(
            rank=rank.rank,
            code=signal_code(rank.exit_code),
            evidence=Evidence(source=run.leg, rank=rank.rank, step=rank.last_step, text=text),
            by_launcher=signal_code(rank.exit_code) == SIGTERM,
        )


def _of_log(exit: ProcessExit, logs: LogFacts) -> Ending:
    code = signal_code(exit.code)
    stopped = exit.by_launcher or code == SIGTERM or (code == KILL and _ended_by_torchrun(exit, logs))
    return Ending(rank=exit.rank, code=code, evidence=exit.evidence, by_launcher=stopped)


def _ended_by_torchrun(exit: ProcessExit, logs: LogFacts) -> bool:
    """True for a rank that torchrun killed because it did not answer to SIGTERM, after the watchdog had ended another.

    A rank that fails first by an exception may be one that only lost the rank that was killed.
    """
    listed = exit.evidence.text.lstrip().startswith("exitcode")
    return listed and any("failed (exitcode: " in one.evidence.text and one.code == ABORT for one in logs.exits)
