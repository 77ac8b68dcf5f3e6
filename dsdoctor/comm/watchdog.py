"""Inside a rank of the communication check: what it writes down, and the thread that ends it when a step is too long.

A rank that waits in a collective cannot help itself, so a second thread holds the clock. It also receives SIGTERM,
which Python's main thread would not handle inside a collective, so that a rank ended because of another says so.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from dsdoctor.comm import ras
from dsdoctor.comm.order import read_records, record_path
from dsdoctor.runs import collectives
from dsdoctor.runs.flight_recorder import dumps

EXIT_TIMEOUT = 75
EXIT_TERMINATED = 128 + signal.SIGTERM
_STAY = 2.0
"""Seconds that a rank stays after it has said so: its end closes the connections, and with them the call that others,
whose clock runs out a moment later, still have to be seen in."""
_LOOK_EVERY = 0.1
_ASKED = 2.0
"""Seconds for NCCL's answer; all ranks ask at about the same time, before the first of them ends."""


class Recorder:
    """Appends records to this rank's file, each on disk before the next thing happens."""

    def __init__(self, folder: str | Path, rank: int) -> None:
        self._lock = threading.Lock()
        self._file = os.open(record_path(folder, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self.write("hello", rank=rank, pid=os.getpid(), host=socket.gethostname())

    def write(self, event: str, **values: Any) -> None:
        line = json.dumps({"event": event, "time": time.time(), **values}) + "\n"
        with self._lock:
            os.write(self._file, line.encode())


class Watchdog:
    """Ends this process when a step passes its deadline (seconds), or when SIGTERM comes. Start it before torch."""

    def __init__(self, recorder: Recorder, *, folder: str | Path, rank: int, world_size: int, deadline: float) -> None:
        self._recorder = recorder
        self._folder = folder
        self._peers = [other for other in range(world_size) if other != rank]
        self._deadline = deadline
        self._main = threading.get_ident()
        self._step: tuple[str, str, float] | None = None
        self._lock = threading.Lock()
        self.uses_nccl = False
        """To be set by the rank once it knows."""

    def start(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    @contextlib.contextmanager
    def timed(self, step: str, dtype: str = "") -> Iterator[None]:
        """The clock of one step."""
        self._set((step, dtype, time.monotonic()))
        try:
            yield
        finally:
            self._set(None)

    def _set(self, step: tuple[str, str, float] | None) -> None:
        with self._lock:
            self._step = step

    def _watch(self) -> None:
        while signal.sigtimedwait({signal.SIGTERM}, _LOOK_EVERY) is None:
            with self._lock:
                if self._step is not None and time.monotonic() - self._step[2] > self._deadline:
                    self._end("timeout", EXIT_TIMEOUT)
        self._end("terminated", EXIT_TERMINATED)

    def _end(self, event: str, code: int) -> NoReturn:
        """Write down where the main thread stands and what the other processes look like, and be gone."""
        step, dtype, begun = self._step or ("", "", time.monotonic())
        self._recorder.write(
            event,
            step=step,
            dtype=dtype,
            seconds=time.monotonic() - begun,
            stack=self._stack(),
            peers=peer_states(self._folder, self._peers),
        )
        if event == "timeout":
            self._ask()
            time.sleep(_STAY)
        os._exit(code)

    def _ask(self) -> None:
        """What else knows why: torch's flight recorder, and NCCL where that is used. Neither may keep us for long."""
        told: dict[str, Any] = {"calls": [], "ras": ""}

        def ask() -> None:
            with contextlib.suppress(Exception):
                told["calls"] = [call.operation for call in collectives.parse(_recorded()) if not call.finished]
            if self.uses_nccl:
                told["ras"] = ras.ask(_ASKED)

        asking = threading.Thread(target=ask, name="asking", daemon=True)
        asking.start()
        asking.join(2 * _ASKED)
        self._recorder.write("asked", **told)

    def _stack(self) -> str:
        frame = sys._current_frames().get(self._main)
        return "".join(traceback.format_stack(frame)) if frame is not None else ""


def _recorded() -> list[Any]:
    return [json.loads(dump()) for dump in dumps()]


def peer_states(folder: str | Path, peers: list[int]) -> dict[str, str]:
    """State of the processes of other ranks on this host; a rank that has written nothing is left out."""
    states = {}
    for rank in peers:
        hello = next(iter(read_records(folder, rank)), None)
        if hello is not None and hello.get("host") == socket.gethostname():
            states[str(rank)] = process_state(int(hello["pid"]))
    return states


def process_state(pid: int) -> str:
    """The letter that `/proc` shows (T = stopped by a signal, Z = ended, D = waiting for a device), or `gone`."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "gone"
    return text.rpartition(")")[2].split()[0]
