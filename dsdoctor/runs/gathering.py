"""From what the parent saw of a run, and what its ranks wrote, to the facts of it. Reads the run's folder."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dsdoctor.runs import outcome, scale
from dsdoctor.runs.attendance import read_attendance
from dsdoctor.runs.collectives import read_collectives
from dsdoctor.runs.facts import Frame, Leg, RankRun, Run
from dsdoctor.runs.hostmemory import HostMemory
from dsdoctor.runs.launcher import LaunchPlan
from dsdoctor.runs.outcome import Ended
from dsdoctor.runs.processes import LAUNCHER_OUTPUT
from dsdoctor.runs.spec import RunSpec
from dsdoctor.runs.trace import RankTrace, read_trace

_SUMMARY = re.compile(r"\] failed \(exitcode: -?\d+\) local_rank: ")
_USUAL = re.compile(r"^\s|\[[WI]\d{4} |warning|^\[[\d :,-]{19,}\] \[INFO\] |^deepspeed \S+ built ", re.IGNORECASE)
"""A line that comes with most runs: a warning of C++ (`[W1130 ...`) or Python (the second line is indented), and what
DeepSpeed says of its work (`[2026-11-30 08:49:50,328] [INFO] [...`).
"""
_SAID_LINES, _LOOKED_AT = 3, 20
_TAIL_LINES = 5
_TAIL_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What the parent saw of one start: its end, the stacks where it had to be ended, and the host's memory."""

    ended: Ended
    seconds: float
    port: int
    memory: HostMemory
    stacks: dict[int, tuple[Frame, ...]]
    moved: tuple[int, ...]
    removed: tuple[str, ...]


def gather(spec: RunSpec, leg: Leg, expected: int, stall: float, seen: Seen) -> Run:
    """The run of `expected` ranks as facts; its first failure and its outcome are judged by `runs.outcome`.

    `stall` is the limit in seconds after which silence of all ranks would have ended it.
    """
    folder, ended = Path(spec.folder), seen.ended
    traces = [read_trace(folder, rank) for rank in range(expected)]
    attendance = [read_attendance(folder, rank) for rank in range(expected)]
    ranks = [
        outcome.rank_run(trace, each, ended, seen.stacks.get(trace.rank, ()))
        for trace, each in zip(traces, attendance, strict=True)
    ]
    ranks = [
        replace(
            rank,
            collectives=read_collectives(folder, rank.rank),
            printed=_printed(folder, rank),
            moved=rank.rank in seen.moved,
        )
        for rank in ranks
    ]
    first = next(iter(outcome.troubles(ranks, traces, attendance)), None)
    result = outcome.outcome(ranks, traces, first, ended)
    run = _bare(spec, leg, expected)
    return replace(
        run,
        outcome=result,
        ranks=tuple(ranks),
        seconds=seen.seconds,
        why=outcome.why(result, first, ended, ranks, _last_words(folder), _last_line(folder, first)),
        model=next((trace.model for trace in traces if trace.model is not None), None),
        facts=next((trace.facts for trace in traces if trace.facts is not None), None),
        notes=tuple(dict.fromkeys(note for trace in traces for note in trace.notes)),
        memory=seen.memory.samples,
        oom_kills=max(seen.memory.oom_kills, *(each.oom_kills for each in attendance)),
        kernel_kills=seen.memory.kernel_kills,
        launcher_exit=ended.launcher_exit,
        stall_limit=stall,
        loss_scale=_loss_scale(leg, traces, ended),
        extra=_extra(seen, traces),
    )


def _loss_scale(leg: Leg, traces: Sequence[RankTrace], ended: Ended) -> Any:
    for trace in traces:
        if trace.facts is not None:
            return scale.history(leg, trace.facts, trace.steps, trace.failure, ended=not ended.by_us)
    return None


def _extra(seen: Seen, traces: Sequence[RankTrace]) -> dict[str, Any]:
    """What only some readers want."""
    extra: dict[str, Any] = {"port": seen.port, "contained": _contained(traces)}
    if seen.removed:
        extra["removed_shared_memory"] = list(seen.removed)
    return extra


def _contained(traces: Sequence[RankTrace]) -> list[dict[str, str]]:
    """Side effects of the script that were led elsewhere, each once."""
    found = dict.fromkeys((each.what, each.original, each.replacement) for trace in traces for each in trace.contained)
    return [dict(zip(("what", "original", "replacement"), each, strict=True)) for each in found]


def _bare(spec: RunSpec, leg: Leg, ranks: int) -> Run:
    return Run(
        leg=leg,
        engine=spec.engine,
        precision=spec.precision,
        outcome="not-started",
        ranks=(),
        seconds=0.0,
        folder=spec.folder,
        world_size=ranks,
        steps_asked=spec.steps,
    )


def not_started(spec: RunSpec, plan: LaunchPlan, leg: Leg, reason: str) -> Run:
    return replace(_bare(spec, leg, plan.nproc), why=f"the launcher could not be started: {reason}")


def _last_words(folder: Path) -> str:
    """The last lines that the launcher printed.

    Left out are the frames of tracebacks (the line after them says it) and torchrun's summary, which names no cause.
    """
    lines = tail(folder / LAUNCHER_OUTPUT, lines=200).splitlines()
    summary = next((at for at, line in enumerate(lines) if _SUMMARY.search(line)), len(lines))
    told = [line for line in lines[:summary] or lines if not line.startswith((" ", "Traceback "))]
    return "\n".join(list(dict.fromkeys(told))[-_TAIL_LINES:])


def _last_line(folder: Path, rank: RankRun | None) -> str:
    """What the rank said last: argparse, `sys.exit("...")` and loggers do so on stderr, others print."""
    if rank is None:
        return ""
    said = (*_said(folder, "stderr", rank.rank)[-1:], *_said(folder, "stdout", rank.rank)[-1:])
    return "; ".join(dict.fromkeys(said))


def _printed(folder: Path, rank: RankRun) -> str:
    if rank.quiet is not None:
        return _printed_last(folder, rank.rank)
    if rank.exit_code in (None, 0) or rank.failure is not None:
        return ""
    return "\n".join((*_said(folder, "stderr", rank.rank), *_said(folder, "stdout", rank.rank)))


def _said(folder: Path, stream: str, rank: int) -> list[str]:
    """The last lines of a stream that do not come with most runs."""
    lines = tail(folder / f"{stream}-rank{rank}.txt", lines=_LOOKED_AT).splitlines()
    return [line for line in lines if not _USUAL.search(line)][-_SAID_LINES:]


def _printed_last(folder: Path, rank: int) -> str:
    """The last line on stdout or stderr, whichever was written to later."""
    written = [path for name in ("stdout", "stderr") if (path := folder / f"{name}-rank{rank}.txt").exists()]
    return tail(max(written, key=lambda path: path.stat().st_mtime), lines=1) if written else ""


def tail(path: Path, lines: int) -> str:
    """The last lines of a file that are not empty; "" where there is none."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.stat(file.fileno()).st_size - _TAIL_BYTES))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return ""
    return "\n".join([line for line in text.splitlines() if line.strip()][-lines:])
