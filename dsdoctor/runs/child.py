"""The program that every rank runs in place of the user's script: `python -m dsdoctor.runs.child SPEC_PATH`.

It prepares the process, arranges for hooks to be set as the script imports torch, DeepSpeed and their kin, runs the
script as `__main__` and writes how it ended. Arguments other than the spec's path come from the launcher (DeepSpeed's
appends `--local_rank=N`) and are handed on to the script, in front of its own, where that launcher puts them.

Nothing of ours ends the user's run: what fails on our side becomes a note in the trace.
"""

from __future__ import annotations

import os
import random
import socket
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from dsdoctor.runs import rank_process, script, tracebacks
from dsdoctor.runs.containment import Containment
from dsdoctor.runs.imports import ImportHooks
from dsdoctor.runs.intercepts import accelerate, deepspeed, fp32, hub, lightning, process_group, saves, transformers
from dsdoctor.runs.intercepts.shrink import install as install_shrink
from dsdoctor.runs.session import RankSession
from dsdoctor.runs.spec import RunSpec, trace_path
from dsdoctor.runs.trace import TraceWriter

_INTERRUPTED = 130
"""Exit status of a program that Ctrl-C ended."""


def main(arguments: Sequence[str]) -> None:
    """Run the order in the file that is the first argument without a dash. Does not return."""
    spec_path = next(argument for argument in arguments if not argument.startswith("-"))
    from_launcher = [argument for argument in arguments if argument != spec_path]
    session = _prepare(RunSpec.read(spec_path))
    hooks = ImportHooks(lambda name, error: session.note(f"dsdoctor could not hook into {name}: {error!r}"))
    _seed(session, hooks)
    _install(session, hooks)
    code = _run(session, [*from_launcher, *session.spec.args])
    if os.getpid() != session.pid:
        _leave_fork(code)
    rank_process.run_exit_handlers(code)
    hooks.remove()
    session.undo()
    rank_process.leave(code, with_peers=session.stopped)


def _leave_fork(code: int) -> NoReturn:
    """The end of a process that the script forked and that came out of the script too: the rank is another one."""
    rank_process.flush()
    os._exit(code)


def _install(session: RankSession, hooks: ImportHooks) -> None:
    contained = Containment(session)
    process_group.install(session, hooks)
    deepspeed.install(session, hooks, contained)
    accelerate.install(session, hooks)
    transformers.install(session, hooks, contained)
    install_shrink(session, hooks)
    lightning.install(session, hooks)
    fp32.install(session, hooks)
    saves.install(hooks, contained)
    hub.install(session, hooks)
    hooks.install()


def _prepare(spec: RunSpec) -> RankSession:
    folder = Path(spec.folder)
    place = rank_process.place(os.environ)
    rank_process.die_with_parent()
    rank_process.redirect_output(folder, place.rank)
    rank_process.show_stacks_on_signal(folder, place.rank)
    os.chdir(spec.cwd)
    trace = TraceWriter(trace_path(folder, place.rank))
    trace.start(
        rank=place.rank,
        local_rank=place.local_rank,
        world_size=place.world_size,
        host=socket.gethostname(),
        versions=rank_process.installed_versions(),
    )
    return RankSession(spec, trace, place.rank, place.local_rank, place.world_size)


def _seed(session: RankSession, hooks: ImportHooks) -> None:
    """Seed each generator before the script can draw from it; what the script seeds itself comes later and wins."""
    seed = session.spec.seed
    if seed is None:
        return

    def seed_numpy(module: ModuleType) -> None:
        module.random.seed(seed % 2**32)

    def seed_torch(module: ModuleType) -> None:
        module.manual_seed(seed)

    random.seed(seed)
    hooks.after_import("numpy", seed_numpy)
    hooks.after_import("torch", seed_torch)
    session.note(f"seeded Python, NumPy and torch with {seed} before the script started")


def _run(session: RankSession, arguments: Sequence[str]) -> int:
    """Run the script, write how it ended, and return its exit code; 0 where it was dsdoctor that ended it."""
    spec = session.spec
    try:
        if spec.as_module:
            script.run_module(spec.script, arguments)
        else:
            script.run_file(spec.script, arguments)
        rank_process.join_threads()
        code = 0
    except SystemExit as ending:
        code = _exit_code(ending)
    except KeyboardInterrupt as error:
        _print(error)
        code = _INTERRUPTED
    except BaseException as error:
        _print(error)
        if session.stopped:
            return 0
        session.trace.failure(tracebacks.failure_of(error, rank=session.rank, step=session.step))
        return 1
    if session.stopped:
        return 0
    session.trace.finish(code)
    return code


def _print(error: BaseException) -> None:
    """Print an exception as Python would at the end of the script, by the hook in force (torch adds the rank)."""
    tracebacks.clean(error)
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except Exception:
        traceback.print_exception(error)


def _exit_code(ending: SystemExit) -> int:
    """The status that Python would exit with; a message goes to stderr and means 1."""
    if ending.code is None:
        return 0
    if isinstance(ending.code, int):
        return ending.code & 0xFF
    print(ending.code, file=sys.stderr)
    return 1


if __name__ == "__main__":
    main(sys.argv[1:])
