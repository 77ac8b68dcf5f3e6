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
from typing import TYPE_CHECKING

from dsdoctor.runs import extensions, output, stacks
from dsdoctor.runs.attendance import VARIABLES
from dsdoctor.runs.facts import Frame, Leg, Run
from dsdoctor.runs.gathering import Seen, gather, not_started, tail
from dsdoctor.runs.hostmemory import HostMemory
from dsdoctor.runs.launcher import LaunchError, LaunchPlan, command, environment, free_port, kills_by_name, world_size
from dsdoctor.runs.outcome import Ended, Reason
from dsdoctor.runs.processes import ATTENDANT, LAUNCHER_OUTPUT, Processes, handled, kill, raise_interrupt
from dsdoctor.runs.spec import RunSpec, collectives_path
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


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Seconds for the whole run, and seconds without progress of any rank after which it counts as hung."""

    timeout: float = 600
    stall: float = 60


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
        return not_started(spec, plan, leg, str(error))
    return gather(spec, leg, ranks, limits.stall, seen)


def _run_once(
    spec: RunSpec,
    plan: LaunchPlan,
    limits: Limits,
    path: Path,
    ranks: int,
    progress: Callable[[str], None] | None,
) -> Seen:
    folder = Path(spec.folder)
    port = plan.master_port or free_port()
    line = command(plan, ATTENDANT, [str(folder), CHILD, str(path)], port)
    started = time.monotonic()
    with contextlib.ExitStack() as stack:
        stack.enter_context(handled((signal.SIGTERM, signal.SIGHUP), raise_interrupt))
        cache = extensions.prepared(extensions.cache_folder(plan.device))
        processes = stack.enter_context(Processes(folder, ask=not kills_by_name(plan)))
        env = environment(plan, folder) | {extensions.VARIABLE: str(cache)}
        ours = {name: value for name, value in env.items() if os.environ.get(name) != value}
        (folder / VARIABLES).write_text(json.dumps(ours), encoding="utf-8")
        processes.start(line, env, spec.cwd, folder / LAUNCHER_OUTPUT)
        memory = stack.enter_context(contextlib.closing(HostMemory()))
        ended = _watch(processes, memory, Watch(folder=folder, ranks=ranks), cache, spec, limits, progress)
        found, moved = _stacks(folder, ranks, ended)
        removed = processes.end()
    return Seen(
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
            return Ended(reason=reason, time=time.time(), limit=limit, quiet=watch.quiet())
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


def _port_was_taken(folder: Path, seen: Seen) -> bool:
    """True if the rendezvous failed since another program took the port between our choice and its use."""
    if seen.ended.launcher_exit in (None, 0):
        return False
    texts = [tail(path, lines=200) for path in (folder / LAUNCHER_OUTPUT, *folder.glob("stderr-rank*.txt"))]
    port = re.compile(rf"\b{seen.port}\b")
    lines = (line for text in texts for line in text.splitlines())
    return any(_PORT_TAKEN.search(line) and port.search(line) for line in lines)


def _clear(folder: Path) -> None:
    """Remove what a start left that is to be repeated."""
    for path in (*folder.glob("*-rank*.*"), folder / LAUNCHER_OUTPUT):
        path.unlink(missing_ok=True)
