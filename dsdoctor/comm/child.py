"""The rank itself, as a child of the process that a launcher started: made early, let go later, watched, ended.

It is forked after torch was imported and before anything of torch was used, so that torch is read once a rank.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import NoReturn

from dsdoctor.comm.nccl_log import NCCL_LOG
from dsdoctor.comm.order import order_path, record_path
from dsdoctor.comm.started import Started
from dsdoctor.comm.watchdog import process_state
from dsdoctor.runs.flight_recorder import recording
from dsdoctor.runs.rank_process import die_with_parent

OUTPUT = "output.txt"
NCCL_OUTPUT = "nccl.log"
_GO = b"1"


class RankChild:
    """Context manager: leaving it kills the child and all of its process group, if it still lives.

    It writes its records into `folder`, and does there what the order says that lies there when it is let go.
    """

    def __init__(self, place: Started, folder: Path) -> None:
        self._records = record_path(folder, place.rank)
        self._code: int | None = None
        self._seen = (0, time.monotonic())
        waits, self._gate = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._gate)
            _be_the_rank(place, folder, waits)
        os.close(waits)

    def __enter__(self) -> RankChild:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        os.close(self._gate)

    def go(self) -> None:
        """Let the rank begin."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self._gate, _GO)
        self._seen = (0, time.monotonic())

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it lives."""
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code

    def wait(self, seconds: float) -> int | None:
        end = time.monotonic() + seconds
        while self.poll() is None and time.monotonic() < end:
            time.sleep(0.02)
        return self._code

    @property
    def state(self) -> str:
        """The kernel's letter for the process: T is stopped by a signal."""
        return process_state(self.pid) if self.poll() is None else ""

    def silence(self) -> float:
        """Seconds since it last wrote something down, as far as this was asked often enough."""
        with contextlib.suppress(OSError):
            size = self._records.stat().st_size
            if size != self._seen[0]:
                self._seen = (size, time.monotonic())
        return time.monotonic() - self._seen[1]

    def terminate(self) -> None:
        """Ask it to write down where it stands, and end."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        if self.poll() is not None:
            return
        for end in (os.killpg, os.kill):  # it may not have its own group yet
            with contextlib.suppress(ProcessLookupError, PermissionError):
                end(self.pid, signal.SIGKILL)
        self.wait(2.0)


def _be_the_rank(place: Started, folder: Path, waits: int) -> NoReturn:
    """In the child: wait for the word, then run the check's steps. Never returns into the parent's code."""
    try:
        os.setsid()
        die_with_parent()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        sink = os.open(folder / OUTPUT, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for stream in (1, 2):
            os.dup2(sink, stream)
        os.environ.update(
            RANK=str(place.rank),
            LOCAL_RANK=str(place.local_rank),
            WORLD_SIZE=str(place.world_size),
            MASTER_ADDR=place.master_addr,
            MASTER_PORT=str(place.master_port),
            TORCHELASTIC_USE_AGENT_STORE="True",  # the process beside us, or torchrun's agent, holds the store
        )
        for name, value in {**NCCL_LOG, "NCCL_DEBUG_FILE": str(folder / NCCL_OUTPUT), **recording()}.items():
            os.environ.setdefault(name, value)
        if os.read(waits, 1) == _GO:
            from dsdoctor.comm import rank

            rank.run([str(order_path(folder))])
    finally:
        os._exit(1)
