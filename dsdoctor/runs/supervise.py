"""One observed run of the user's script: start the ranks, watch them, end what hangs, gather what they wrote.

Whatever happens in here or to this process, nothing that it started stays (see `runs.processes`).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsdoctor.runs import extensions, outcome, output, scale, stacks
from dsdoctor.runs.attendance import VARIABLES, Attendance, read_attendance
from dsdoctor.runs.collectives import read_collectives
from dsdoctor.runs.facts import Frame, Leg, RankRun, Run
from dsdoctor.runs.hostmemory import HostMemory
from dsdoctor.runs.launcher import LaunchError, LaunchPlan, command, environment, free_port, world_size
from dsdoctor.runs.outcome import Ended, Reason
from dsdoctor.runs.processes import ATTENDANT, LAUNCHER_OUTPUT, Processes, handled, kill, raise_interrupt
from dsdoctor.runs.spec import RunSpec, collectives_path
from dsdoctor.runs.trace import RankTrace, read_trace
from dsdoctor.runs.watch import Watch

if TYPE_CHECKING:
    import psutil

CHILD = "dsdoctor.runs.child"
_POLL = 0.2
_START_SECONDS = 60.0
"""A rank may be silent for this long before its first forward pass, whatever the stall limit is: on a cold disk or a
busy machine the imports, the data and the building of the engine take their time without a word."""
_BUILD_SECONDS = 600.0
"""The first use of an op builds it, once on a machine; up to so long that does not count against a run's time limit."""
_SETTLE_SECONDS = 20.0
"""How long processes may go on once the end of the run is certain: a launcher waits for the peers of a failed rank, a
script cleans up."""
_SECOND_LOOK_SECONDS = 1.0
_RECORDER_SECONDS = 2.0
_PORT_TRIES = 3
_PORT_TAKEN = re.compile("EADDRINUSE|address already in use", re.IGNORECASE)
_COMPILERS = {
    "ninja",
    "c++",
    "g++",
    "gcc",
    "cc1plus",
    "nvcc",
    "cicc",
    "ptxas",
    "fatbinary",
    "cudafe++",
    "clang++",
    "ld",
}
_SUMMARY = re.compile(r"\] failed \(exitcode: -?\d+\) local_rank: ")
_TAIL_LINES = 5
_TAIL_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Seconds for the whole run, and seconds without progress of any rank after which it counts as hung."""

    timeout: float = 600
    stall: float = 60


@dataclass(frozen=True, kw_only=True)
class _Seen:
    """What the parent saw of one start: its end, the stacks where it had to be ended, and the host's memory."""

    ended: Ended
    seconds: float
    port: int
    memory: HostMemory
    stacks: dict[int, tuple[Frame, ...]]
    moved: tuple[int, ...]
    removed: tuple[str, ...]


def supervise(
    spec: RunSpec, plan: LaunchPlan, limits: Limits, leg: Leg, progress: Callable[[str], None] | None = None
) -> Run:
    """Run the script as `spec` orders, on the ranks that `plan` says, and tell what happened.

    Creates `spec.folder`, which holds everything that the run leaves. `progress` is told in a few words how far it is.
    A run that cannot be started is a result too; KeyboardInterrupt (and a SIGTERM or SIGHUP to this process, which
    become one) ends all processes and is raised on.
    """
    folder = Path(spec.folder).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    spec = replace(spec, folder=str(folder))
    path = spec.write()
    try:
        ranks = world_size(plan)
        for attempt in range(_PORT_TRIES):
            seen = _run_once(spec, plan, limits, path, ranks, progress)
            if plan.master_port is not None or attempt == _PORT_TRIES - 1 or not _port_was_taken(folder, seen):
                break
            _clear(folder)
    except (LaunchError, OSError) as error:
        return _not_started(spec, plan, leg, str(error))
    return _gather(spec, leg, ranks, seen)


def _run_once(
    spec: RunSpec,
    plan: LaunchPlan,
    limits: Limits,
    path: Path,
    ranks: int,
    progress: Callable[[str], None] | None,
) -> _Seen:
    folder = Path(spec.folder)
    port = plan.master_port or free_port()
    line = command(plan, ATTENDANT, [str(folder), CHILD, str(path)], port)
    started = time.monotonic()
    with contextlib.ExitStack() as stack:
        stack.enter_context(handled((signal.SIGTERM, signal.SIGHUP), raise_interrupt))
        cache = extensions.prepared(extensions.cache_folder(plan.device))
        processes = stack.enter_context(Processes(folder))
        env = environment(plan, folder) | {extensions.VARIABLE: str(cache)}
        ours = {name: value for name, value in env.items() if os.environ.get(name) != value}
        (folder / VARIABLES).write_text(json.dumps(ours), encoding="utf-8")
        processes.start(line, env, spec.cwd, folder / LAUNCHER_OUTPUT)
        memory = stack.enter_context(contextlib.closing(HostMemory()))
        ended = _watch(processes, memory, Watch(folder=folder, ranks=ranks), cache, spec, limits, progress)
        found, moved = _stacks(folder, ranks, ended)
        removed = processes.end()
    return _Seen(
        ended=ended,
        seconds=time.monotonic() - started,
        port=port,
        memory=memory,
        stacks=found,
        moved=moved,
        removed=removed,
    )


def _watch(
    processes: Processes,
    memory: HostMemory,
    watch: Watch,
    cache: Path,
    spec: RunSpec,
    limits: Limits,
    progress: Callable[[str], None] | None,
) -> Ended:
    """Look every moment until the run is over or has to be ended."""
    started, told = time.monotonic(), -1
    last, building, low = started, 0.0, False
    while True:
        code = processes.poll()
        members = processes.members()
        memory.sample(members)
        if memory.low and not low:
            stacks.request_stacks(watch.folder, "memory is low")  # a rank that is killed can tell no more where it was
        low = memory.low
        watch.look()
        output.bound((*watch.outputs, watch.folder / LAUNCHER_OUTPUT))
        if progress is not None and watch.steps > told:
            told = watch.steps
            progress(f"step {told} of {spec.steps}" if told else "starting")
        if code is not None:
            return Ended(reason="launcher", time=time.time(), launcher_exit=code)
        if memory.exhausted:
            return _out_of_memory(members)
        now = time.monotonic()
        if _compiling(members):
            building += now - last
            watch.last_progress = now
        last = now
        spent = now - started - min(building, _BUILD_SECONDS)
        reason = _to_be_ended(watch, limits, spent)
        if reason == "hung" and extensions.waited_for(cache):
            watch.last_progress = now
        elif reason is not None:
            limit = _patience(watch, limits) if reason == "hung" else limits.timeout
            return Ended(reason=reason, time=time.time(), limit=limit)
        memory.rest(_POLL)
        if memory.exhausted:
            return _out_of_memory(members)


def _out_of_memory(members: Sequence[psutil.Process]) -> Ended:
    """Kill at once: what is asked to end goes on filling the memory meanwhile."""
    ended = Ended(reason="memory", time=time.time())
    kill(members)
    return ended


def _to_be_ended(watch: Watch, limits: Limits, seconds: float) -> Reason | None:
    now = time.monotonic()
    if watch.decided is not None:
        return "settled" if now - watch.decided > _SETTLE_SECONDS else None
    if seconds > limits.timeout:
        return "timeout"
    return "hung" if now - watch.last_progress > _patience(watch, limits) else None


def _patience(watch: Watch, limits: Limits) -> float:
    return limits.stall if watch.all_began_training else max(limits.stall, _START_SECONDS)


def _compiling(members: Sequence[psutil.Process]) -> bool:
    """True while an op is being built, which is silent for minutes."""
    import psutil

    for member in members:
        with contextlib.suppress(psutil.Error):
            if member.name() in _COMPILERS and member.status() != psutil.STATUS_ZOMBIE:
                return True
    return False


def _stacks(folder: Path, ranks: int, ended: Ended) -> tuple[dict[int, tuple[Frame, ...]], tuple[int, ...]]:
    """Stacks of the ranks that are still there, and which of them moved between two looks."""
    if ended.reason in ("hung", "timeout"):
        stacks.ask(folder, range(ranks), "first look")
        before = {rank: stacks.read_stack(folder, rank) for rank in range(ranks)}
        time.sleep(_SECOND_LOOK_SECONDS)
        stacks.ask(folder, range(ranks), "second look")
        after = {rank: stacks.read_stack(folder, rank) for rank in range(ranks)}
        _wait_for_recorders(folder, [rank for rank in after if after[rank]])
        return after, tuple(rank for rank in after if after[rank] != before[rank])
    return {rank: stacks.read_stack(folder, rank) for rank in range(ranks)}, ()


def _wait_for_recorders(folder: Path, ranks: Sequence[int]) -> None:
    """Their last collectives come from a thread of each rank, a moment later than the stacks, or never."""
    deadline = time.monotonic() + _RECORDER_SECONDS
    while time.monotonic() < deadline and not all(collectives_path(folder, rank).exists() for rank in ranks):
        time.sleep(0.05)


def _gather(spec: RunSpec, leg: Leg, expected: int, seen: _Seen) -> Run:
    folder, ended = Path(spec.folder), seen.ended
    traces = [read_trace(folder, rank) for rank in range(expected)]
    attendance = [read_attendance(folder, rank) for rank in range(expected)]
    ranks = [
        outcome.rank_run(trace, each, ended, seen.stacks.get(trace.rank, ()))
        for trace, each in zip(traces, attendance, strict=True)
    ]
    ranks = [replace(rank, collectives=read_collectives(folder, rank.rank)) for rank in ranks]
    first = next(iter(outcome.troubles(ranks, attendance)), None)
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
        loss_scale=_loss_scale(leg, traces, ended),
        extra=_extra(seen, traces, attendance, ranks),
    )


def _loss_scale(leg: Leg, traces: Sequence[RankTrace], ended: Ended) -> Any:
    for trace in traces:
        if trace.facts is not None:
            return scale.history(leg, trace.facts, trace.steps, trace.failure, ended=not ended.by_us)
    return None


def _extra(
    seen: _Seen, traces: Sequence[RankTrace], attendance: Sequence[Attendance], ranks: Sequence[RankRun]
) -> dict[str, Any]:
    """What only some readers want. `states` are the kernel's letters for ranks that were found hanging."""
    extra: dict[str, Any] = {"port": seen.port, "contained": _contained(traces)}
    if states := {each.rank: each.state for each in attendance if each.state}:
        extra["states"] = states
        extra["moved"] = list(seen.moved)
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


def _not_started(spec: RunSpec, plan: LaunchPlan, leg: Leg, reason: str) -> Run:
    return replace(_bare(spec, leg, plan.nproc), why=f"the launcher could not be started: {reason}")


def _port_was_taken(folder: Path, seen: _Seen) -> bool:
    """True if the rendezvous failed since another program took the port between our choice and its use."""
    if seen.ended.launcher_exit in (None, 0):
        return False
    texts = [_tail(path, lines=200) for path in (folder / LAUNCHER_OUTPUT, *folder.glob("stderr-rank*.txt"))]
    port = re.compile(rf"\b{seen.port}\b")
    lines = (line for text in texts for line in text.splitlines())
    return any(_PORT_TAKEN.search(line) and port.search(line) for line in lines)


def _clear(folder: Path) -> None:
    """Remove what a start left that is to be repeated."""
    for path in (*folder.glob("*-rank*.*"), folder / LAUNCHER_OUTPUT):
        path.unlink(missing_ok=True)


def _last_words(folder: Path) -> str:
    """The last lines that the launcher printed.

    Left out are the frames of tracebacks (the line after them says it) and torchrun's summary, which names no cause.
    """
    lines = _tail(folder / LAUNCHER_OUTPUT, lines=200).splitlines()
    summary = next((at for at, line in enumerate(lines) if _SUMMARY.search(line)), len(lines))
    told = [line for line in lines[:summary] or lines if not line.startswith((" ", "Traceback "))]
    return "\n".join(list(dict.fromkeys(told))[-_TAIL_LINES:])


def _last_line(folder: Path, rank: RankRun | None) -> str:
    """What the rank printed last to stderr: argparse and `sys.exit("...")` say there what was wrong."""
    return _tail(folder / f"stderr-rank{rank.rank}.txt", lines=1) if rank is not None else ""


def _tail(path: Path, lines: int) -> str:
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.stat(file.fileno()).st_size - _TAIL_BYTES))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return ""
    return "\n".join([line for line in text.splitlines() if line.strip()][-lines:])
