"""The process that starts one rank and stays beside it: `python -m dsdoctor.runs.attendant FOLDER MODULE ARGS...`.

Every launcher starts this in the place of the rank, on every node. It runs `python -m MODULE ARGS`, and does what
neither the rank nor the far parent can do dependably:

- it writes down how the rank ended (exit code or signal, and when), and whether it had been told to end before;
- it asks the rank for its stacks when the parent wants them, if the rank is able to answer;
- it ends the rank and all that it started as soon as the launcher or dsdoctor itself is gone, and removes their shared
  memory.

It ends the way the rank ended, so that the launcher reacts as it would have without it. Standard library only (psutil
where processes must be ended); what it writes is read by `runs.attendance`.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from dsdoctor.machine.cgroup import oom_kills
from dsdoctor.runs.attendance import LIFE_LINE, STACK_REQUEST, VARIABLES, attendance_path
from dsdoctor.runs.leftovers import SharedMemory, marked_pids
from dsdoctor.runs.rank_variables import SRUN, TORCHRUN
from dsdoctor.runs.spec import RUN_MARKER, STACK_SIGNAL

_PR_SET_CHILD_SUBREAPER = 36
_INTERVAL = 0.25
"""Seconds between two looks at the parent; the end of the rank is noticed at once."""
_LATE_SIGNAL = 0.1
"""Seconds in which the signal that ended the rank may still come here: a launcher signals one after another."""
_CANNOT_ANSWER = "TtZX"
"""Stopped by a signal or a debugger, or dead."""
_TOLD_BY = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


class Attendant:
    """Starts the rank (in `start`) and sees it through to its end (in `attend`)."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder = folder
        self._log = open(attendance_path(folder, rank), "a", encoding="utf-8", buffering=1)  # noqa: SIM115
        self._launcher = os.getppid()
        self._told = False
        self._asked = ""
        self._oom_kills = oom_kills()
        self._memory = SharedMemory()
        self._wake_up, self._waker = os.pipe()
        for end in (self._wake_up, self._waker):
            os.set_blocking(end, False)
        _adopt_orphans()

    def start(self, module: str, args: Sequence[str]) -> int:
        """Start the rank and return its pid."""
        signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in _TOLD_BY:
            if signal.getsignal(number) is not signal.SIG_IGN:  # what was ignored stays ignored, in the rank too
                signal.signal(number, self._tell)
        rank = subprocess.Popen([sys.executable, "-u", "-m", module, *args])
        self._record("start", pid=rank.pid, attendant=os.getpid(), host=socket.gethostname())
        return rank.pid

    def attend(self, pid: int) -> int:
        """Wait for the rank's end; its exit code, negative for a signal."""
        while True:
            code = self._reap(pid)
            if code is not None:
                return self._ended(code)
            if os.getppid() != self._launcher or _parent_is_gone(self._folder):
                self._memory.look(marked_pids(self._folder), again=True)
                _end_descendants()
                self._memory.remove()  # else dsdoctor does
                return self._ended(-signal.SIGKILL, deserted=True)
            self._pass_request_on(pid)
            select.select([self._wake_up], [], [], _INTERVAL)
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake_up, 4096)

    def _tell(self, number: int, _: FrameType | None) -> None:
        if not self._told:
            self._told = True
            self._record("told", signal=number)

    def _reap(self, rank: int) -> int | None:
        """Collect what has ended; orphans of the rank too, as they are children of this process now."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return None
            if pid == rank:
                return os.waitstatus_to_exitcode(status)
            if pid == 0:
                return None

    def _ended(self, code: int, *, deserted: bool = False) -> int:
        killed = max(0, oom_kills() - self._oom_kills)
        self._record("end", exit_code=code, deserted=deserted, oom_kills=killed)
        if code == -signal.SIGTERM and not self._told:
            time.sleep(_LATE_SIGNAL)  # lets a signal on its way be recorded as "told"
        return code

    def _pass_request_on(self, pid: int) -> None:
        try:
            request = (self._folder / STACK_REQUEST).read_text(encoding="utf-8")
        except OSError:
            return
        if request == self._asked:
            return
        self._asked = request
        state, answers = _state(pid)
        self._record("asked", state=state, answers=answers)
        if answers:
            os.kill(pid, STACK_SIGNAL)

    def _record(self, event: str, **values: object) -> None:
        with contextlib.suppress(OSError):
            self._log.write(json.dumps({"event": event, "t": time.time(), **values}) + "\n")


def _adopt_orphans() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _parent_is_gone(folder: Path) -> bool:
    """True if nobody holds the lock on the life line any more. False where the file system has no locks."""
    try:
        with open(folder / LIFE_LINE, "rb") as line:
            fcntl.flock(line, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:  # held by dsdoctor (the normal case), or there is none
        return False
    return True


def _end_descendants() -> None:
    import psutil

    children = psutil.Process().children(recursive=True)
    while children:
        for child in children:
            with contextlib.suppress(psutil.Error):
                child.kill()
        psutil.wait_procs(children, timeout=1)
        remaining = psutil.Process().children(recursive=True)
        if {child.pid for child in remaining} == {child.pid for child in children}:
            return  # not to be killed (in the kernel)
        children = remaining


def _state(pid: int) -> tuple[str, bool]:
    """State letter of a process (R, S, D, T, ...) and whether it can answer: it runs, and catches `STACK_SIGNAL`, which
    would kill it else."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return "", False
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    state = fields.get("State", "").strip()[:1]
    caught = int(fields.get("SigCgt", "0"), 16) >> (STACK_SIGNAL - 1) & 1
    return state, bool(caught) and state not in _CANNOT_ANSWER


def _take_slurm_ranks() -> None:
    """Under srun nobody sets the variables that torch reads."""
    for part in ("rank", "local_rank", "world_size"):
        name, slurm = getattr(TORCHRUN, part), getattr(SRUN, part)
        if name not in os.environ and slurm in os.environ:
            os.environ[name] = os.environ[slurm]


def _take_variables(folder: Path) -> None:
    """What dsdoctor sets for the ranks, where the launcher did not bring it here."""
    with contextlib.suppress(OSError, ValueError):
        os.environ.update(json.loads((folder / VARIABLES).read_text(encoding="utf-8")))


def _die_like(code: int) -> None:
    """End with `code`; by the same signal where it is one, without a second core dump."""
    if code >= 0:
        os._exit(code)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if -code not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [-code])
    os.kill(os.getpid(), -code)
    os._exit(128 - code)


def main(argv: Sequence[str]) -> None:
    # the deepspeed launcher puts --local_rank before all other arguments; it is meant for the module
    injected = [argument for argument in argv[:1] if argument.startswith("--local_rank")]
    folder, module, *args = argv[len(injected) :]
    _take_slurm_ranks()
    _take_variables(Path(folder))
    os.environ.setdefault(RUN_MARKER, folder)
    attendant = Attendant(Path(folder), int(os.environ.get("RANK", "0")))
    _die_like(attendant.attend(attendant.start(module, [*injected, *args])))


if __name__ == "__main__":
    main(sys.argv[1:])
