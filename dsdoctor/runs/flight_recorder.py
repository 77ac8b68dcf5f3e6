"""Inside a rank: what torch's flight recorder holds, written to a file whenever the parent asks for the stacks.

The recorder keeps the last collectives of each process group, those over gloo too in recent releases. A rank that
waits in a collective cannot act itself, so a thread of ours looks for the request; a main thread that holds Python's
lock leaves no room for it, and then there is no answer. Imports no torch; the script has, before there is a group.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from dsdoctor.runs.attendance import STACK_REQUEST
from dsdoctor.runs.spec import collectives_path

_INTERVAL = 0.5
_DUMPS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
"""Of gloo and of NCCL; which of them there are depends on the build and release of torch."""


def recording() -> dict[str, str]:
    """Variables that make torch record, in a number that holds the last steps; newer and older name of one thing."""
    return dict.fromkeys(("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"), "2000")


class FlightRecorder:
    """Watches for requests from `start` on until `stop`."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._request = folder / STACK_REQUEST
        self._target = collectives_path(folder, rank)
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to watch, once. To be called when there is a process group, which has threads of its own anyway."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="dsdoctor", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        self._stopped.set()

    def _watch(self) -> None:
        answered = _text(self._request)
        while not self._stopped.wait(_INTERVAL):
            asked = _text(self._request)
            if asked != answered:
                answered = asked
                with contextlib.suppress(Exception):
                    self._answer()

    def _answer(self) -> None:
        parts = [dump() for dump in dumps()]
        partial = self._target.with_suffix(".partial")
        partial.write_bytes(b"[" + b",".join(parts) + b"]")
        os.replace(partial, self._target)


def dumps() -> list[Callable[[], bytes]]:
    """What gives the records of this process in JSON; none before torch made a process group."""
    module = sys.modules.get("torch._C._distributed_c10d")
    found = [getattr(module, name, None) for name in _DUMPS]
    return [dump for dump in found if dump is not None]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
