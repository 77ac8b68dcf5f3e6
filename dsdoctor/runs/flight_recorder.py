"""Inside a rank: what torch's flight recorder holds, written to a file whenever the parent asks for the stacks.

The recorder keeps the last collectives of each process group, those over gloo too in recent releases. A rank that
waits in a collective cannot act itself, so a thread of ours looks for the request; a main thread that holds Python's
lock leaves no room for it, and then there is no answer. Imports no torch; the script has, before there is a group.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import sys
import threading
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

from dsdoctor.runs.attendance import STACK_REQUEST
from dsdoctor.runs.spec import collectives_path

_INTERVAL = 0.5
_DUMPS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
"""Of gloo and of NCCL; which of them there are depends on the build and release of torch."""


_HEADER = Path("include", "torch", "csrc", "distributed", "c10d", "FlightRecorder.hpp")
_NAMES = re.compile(r"max_entries_\s*=\s*getCvarInt\(\s*\{([^}]*)\}")
_OLD_NAME = "TORCH_NCCL_TRACE_BUFFER_SIZE"
_ENTRIES = "2000"
"""Collectives that are kept, enough for the last steps."""


def recording(given: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variable that makes torch record, where `given` does not set it already.

    Its name changed over the releases, and torch prints a warning for an older one: the installed torch's own header
    says which one it reads first.
    """
    names = _variables()
    return {} if any(name in given for name in names) else {names[0]: _ENTRIES}


@cache
def _variables() -> tuple[str, ...]:
    """All names that the installed torch knows for it, the newest first. Does not import torch."""
    torch = importlib.util.find_spec("torch")
    for place in (torch.submodule_search_locations if torch is not None else None) or ():
        with contextlib.suppress(OSError):
            found = _NAMES.search((Path(place) / _HEADER).read_text(encoding="utf-8"))
            if found is not None and (names := re.findall(r'"(\w+)"', found[1])):
                return tuple(names)
    return (_OLD_NAME,)


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
