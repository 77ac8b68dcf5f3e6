"""The process of one rank: who it is, where its output goes, how it shows its stacks, how it dies and ends.

Runs in rank processes only. torch is not imported here; it is used where the script has imported it.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from dsdoctor.machine.versions import installed_of
from dsdoctor.runs.rank_variables import ALL
from dsdoctor.runs.spec import STACK_SIGNAL, stack_path

_PR_SET_PDEATHSIG = 1
_END_SECONDS = 15.0
"""Limit of all that happens between the script's end and the process's: exit handlers, peers, teardown."""

_VERSIONS_OF = ("torch", "deepspeed", "transformers", "accelerate", "lightning", "pytorch-lightning", "numpy")


@dataclass(frozen=True, kw_only=True)
class Place:
    """Which rank this process is, as its launcher said."""

    rank: int
    local_rank: int
    world_size: int


def place(environment: Mapping[str, str]) -> Place:
    """Rank, local rank and world size from the variables of torchrun and DeepSpeed, MPI or SLURM."""
    return Place(
        rank=_first(environment, [one.rank for one in ALL], 0),
        local_rank=_first(environment, [one.local_rank for one in ALL], 0),
        world_size=_first(environment, [one.world_size for one in ALL], 1),
    )


def die_with_parent() -> None:
    """Ask the kernel for SIGKILL when the launcher goes; where there is no such call, the parent cleans up alone."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def redirect_output(folder: Path, rank: int) -> None:
    """Send descriptors 1 and 2 to files of the run, so that C++ and child processes write there too."""
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(folder / f"{name}-rank{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(file, descriptor)
        os.close(file)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def show_stacks_on_signal(folder: Path, rank: int) -> None:
    """Let faulthandler write all threads' stacks on `STACK_SIGNAL` and on fatal signals; needs no ptrace."""
    file = os.open(stack_path(folder, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.set_inheritable(file, False)
    faulthandler.enable(file=file, all_threads=True)
    faulthandler.register(STACK_SIGNAL, file=file, all_threads=True, chain=False)


def installed_versions() -> dict[str, str]:
    """Versions of Python and of the libraries that matter, read from their metadata without importing them."""
    return {"python": sys.version.split()[0], **installed_of(_VERSIONS_OF)}


def join_threads() -> None:
    """Wait for the script's non-daemon threads, as Python does at its end."""
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and not thread.daemon:
            thread.join()


def end_after(seconds: float) -> None:
    """End the process with 0 so much later, if it is still there; at once, without any teardown, for 0."""
    if seconds > 0:
        _exit_later(seconds, 0)
        return
    flush()
    os._exit(0)


def run_exit_handlers(code: int) -> None:
    """Let the script's exit handlers run (loggers and trackers flush there); starts the clock for `leave` too."""
    _exit_later(_END_SECONDS, code)
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()


def leave(code: int, *, with_peers: bool) -> NoReturn:
    """End the process with `code`, whatever teardown does: gloo may abort in it and NCCL hang, which says nothing.

    `with_peers` waits for the other ranks first, so that nobody loses a peer in the middle of its last collective;
    `run_exit_handlers` has set the limit.
    """
    flush()
    _silence()
    with contextlib.suppress(BaseException):
        _leave_process_group(with_peers)
    os._exit(code)


def _exit_later(seconds: float, code: int) -> None:
    timer = threading.Timer(seconds, os._exit, (code,))
    timer.daemon = True
    timer.start()


def _leave_process_group(with_peers: bool) -> None:
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return
    if with_peers:
        distributed.barrier()
    distributed.destroy_process_group()


def flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def _silence() -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(null, descriptor)


def _first(environment: Mapping[str, str], names: Iterable[str], default: int) -> int:
    for name in names:
        with contextlib.suppress(KeyError, ValueError):
            return int(environment[name])
    return default
