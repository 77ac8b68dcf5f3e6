"""The processes of one run: start the launcher, know all that came of it, and end every one of them.

Everything is tied to this process in three ways, since no single one covers all launchers. The launcher dies with us
(`runs.guard`); the attendants of the ranks see that we are gone by a file lock (`runs.attendant`), on other nodes
too; and orphans become our children (PR_SET_CHILD_SUBREAPER), so that what is started here can always be found.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, TYPE_CHECKING, Any

from dsdoctor.runs import guard
from dsdoctor.runs.attendance import LIFE_LINE, Attendance, read_attendance
from dsdoctor.runs.launcher import LaunchPlan, command, environment, free_port, kills_by_name, world_size
from dsdoctor.runs.leftovers import SharedMemory, marked_pids

if TYPE_CHECKING:
    import psutil

ATTENDANT = "dsdoctor.runs.attendant"
LAUNCHER_OUTPUT = "launcher.txt"
_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37
_POLL = 0.2
_KILL_ROUNDS = 5
"""Processes may appear while others are killed, so the search is repeated; more rounds than this find only the
unkillable (waiting in the kernel for a device)."""


class Processes:
    """Context manager around everything that a run starts; leaving it ends all of it.

    `folder` is the run's; its path is the mark by which stray processes are known. `ask` is False for a launcher that
    must not be asked to end: then the attendants end the ranks, and it ends for want of them.
    """

    def __init__(self, folder: Path, *, ask: bool = True) -> None:
        self._folder = folder
        self._ask = ask
        self._launcher: subprocess.Popen[bytes] | None = None
        self._life_line: IO[bytes] | None = None
        self._was_subreaper = False
        self._strangers: set[int] = set()
        self._memory = SharedMemory()

    def __enter__(self) -> Processes:
        self._was_subreaper = _set_subreaper(True)
        self._strangers = {child.pid for child in _descendants()}
        self._life_line = open(self._folder / LIFE_LINE, "wb")
        with contextlib.suppress(OSError):  # a file system without locks; the other ties hold
            fcntl.flock(self._life_line, fcntl.LOCK_EX)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.end()
        finally:
            _set_subreaper(self._was_subreaper)

    def start(self, command: Sequence[str], env: Mapping[str, str], cwd: str | Path, output: Path) -> None:
        """Start the launcher in a session of its own; what it prints is added to `output`."""
        wrapped = [sys.executable, "-I", guard.__file__, str(os.getpid()), *command]
        with open(output, "ab") as sink:
            self._launcher = subprocess.Popen(
                wrapped,
                env=dict(env),
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def poll(self) -> int | None:
        """The launcher's exit code, None while it runs."""
        return None if self._launcher is None else self._launcher.poll()

    def members(self) -> list[psutil.Process]:
        """The launcher and all that descends from it, orphans included, as far as they live.

        Collects orphans that have ended, and notes the shared memory of the others, in passing.
        """
        found = [child for child in _descendants() if child.pid not in self._strangers and not self._collect(child)]
        self._memory.look(child.pid for child in found)
        return found

    def _collect(self, child: psutil.Process) -> bool:
        """True if the process has ended. One that nobody else waits for is reaped."""
        import psutil

        try:
            if child.status() != psutil.STATUS_ZOMBIE:
                return False
            if child.ppid() == os.getpid() and (self._launcher is None or child.pid != self._launcher.pid):
                os.waitpid(child.pid, os.WNOHANG)
        except (psutil.Error, ChildProcessError):
            pass
        return True

    def end(self, grace: float = 5.0) -> tuple[str, ...]:
        """End all that is left; the names of shared memory that was removed.

        The launcher is asked first and has `grace` seconds to end its ranks; then everything that lives is killed.
        An interrupt meanwhile does not stop this: it ends the patience, and is raised when all is done.
        """
        with _hurried_by_interrupt() as hurry:
            self._memory.look((member.pid for member in self.members()), again=True)
            if self.poll() is None and self._launcher is not None:
                self._ask_to_end(self._launcher)
                deadline = time.monotonic() + grace
                while self.poll() is None and time.monotonic() < deadline and not hurry.is_set():
                    time.sleep(0.05)
            self._kill_all()
            self._let_go()
            return self._memory.remove()

    def _ask_to_end(self, launcher: subprocess.Popen[bytes]) -> None:
        if not self._ask:
            self._let_go()
            return
        # its whole group: the deepspeed launcher does not pass the wish on to its second half
        with contextlib.suppress(ProcessLookupError):
            os.killpg(launcher.pid, signal.SIGTERM)

    def _let_go(self) -> None:
        """Free the lock: attendants, those on other nodes too, end their ranks."""
        if self._life_line is not None:
            self._life_line.close()
            self._life_line = None

    def _kill_all(self) -> None:
        for _ in range(_KILL_ROUNDS):
            left = {member.pid for member in self.members()} | marked_pids(self._folder)
            if not left:
                break
            for pid in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            self._wait_for_end(left)
        self.poll()  # reaps the launcher, which `members` leaves to its Popen

    def _wait_for_end(self, pids: set[int], seconds: float = 2.0) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.poll()
            if not pids & {member.pid for member in self.members()}:
                return
            time.sleep(0.02)


def kill(members: Sequence[psutil.Process]) -> None:
    """SIGKILL to these processes, the last started first (ranks before what would start others)."""
    import psutil

    for member in reversed(members):
        with contextlib.suppress(psutil.Error):
            member.kill()


def _descendants() -> list[psutil.Process]:
    import psutil

    return psutil.Process().children(recursive=True)


def _set_subreaper(on: bool) -> bool:
    """Let orphaned descendants become children of this process, or not. What was set before."""
    if sys.platform != "linux":
        return False
    libc = ctypes.CDLL(None)
    before = ctypes.c_int(0)
    libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0)
    return bool(before.value)


@contextlib.contextmanager
def _hurried_by_interrupt() -> Iterator[threading.Event]:
    """Interrupts set the event; one KeyboardInterrupt is raised at the end instead."""
    hurry = threading.Event()
    with handled((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), lambda *_: hurry.set()):
        yield hurry
    if hurry.is_set():
        raise KeyboardInterrupt


@contextlib.contextmanager
def handled(numbers: Sequence[int], handler: Any) -> Iterator[None]:
    """Handle signals by `handler` meanwhile, in the main thread. One that is ignored stays ignored (nohup)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in numbers}
    before = {number: old for number, old in before.items() if old not in (signal.SIG_IGN, None)}
    try:
        for number in before:
            signal.signal(number, handler)
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def raise_interrupt(number: int, _: FrameType | None) -> None:
    """Signal handler: treat a request to end like Ctrl-C, so that everything unwinds."""
    raise KeyboardInterrupt(signal.Signals(number).name)


@dataclass(frozen=True, kw_only=True)
class Completed:
    """How a bounded run went. `exit_code` is the launcher's, None if it was ended when the time was up."""

    exit_code: int | None
    timed_out: bool
    seconds: float
    port: int
    ranks: tuple[Attendance, ...] = field(default=())


def run_bounded(
    plan: LaunchPlan, module: str, args: Sequence[str], *, folder: Path, cwd: str | Path, timeout: float
) -> Completed:
    """Run `python -m MODULE ARGS` on every rank for `timeout` seconds at most; nothing of it remains afterwards.

    `folder` must exist; what launcher and ranks print is in its `launcher.txt`. Raises LaunchError.
    """
    folder = folder.absolute()
    port = plan.master_port or free_port()
    started = time.monotonic()
    with (
        handled((signal.SIGTERM, signal.SIGHUP), raise_interrupt),
        Processes(folder, ask=not kills_by_name(plan)) as processes,
    ):
        line = command(plan, ATTENDANT, [str(folder), module, *args], port)
        processes.start(line, environment(plan, folder), cwd, folder / LAUNCHER_OUTPUT)
        while (code := processes.poll()) is None and time.monotonic() - started < timeout:
            processes.members()
            time.sleep(_POLL)
    return Completed(
        exit_code=code,
        timed_out=code is None,
        seconds=time.monotonic() - started,
        port=port,
        ranks=tuple(read_attendance(folder, rank) for rank in range(world_size(plan))),
    )
