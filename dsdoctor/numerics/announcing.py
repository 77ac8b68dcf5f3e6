"""Prints what the detector found: one rank prints, the others write files. Runs in rank processes only."""

from __future__ import annotations

import atexit
import itertools
import os
import sys
import tempfile
import threading
from pathlib import Path

from dsdoctor.finding import FirstBad
from dsdoctor.numerics import engines
from dsdoctor.numerics.agreement import Agreement, Sighting, agree

DEADLINE = 10.0
"""Seconds that the ranks wait for each other after a hit, in a thread: the training goes on."""
_GRACE = 2.0
"""Seconds that a store may take on top of that to say that it cannot be reached."""
_NUMBERS = itertools.count()
"""Detectors of this process, in the order of their making, which is the same on all ranks."""


class Announcer:
    """Where one detector's words go. `out` is the folder of the ranks that do not print, the temp folder's by default.

    `agreement` is what the ranks agreed on, once they have.
    """

    def __init__(self, out: str | None) -> None:
        self.agreement: Agreement | None = None
        self._out = Path(out) if out is not None else Path(tempfile.gettempdir()) / f"dsdoctor-nan-{os.getuid()}"
        self._name = f"first-bad-{next(_NUMBERS)}"
        self._thread: threading.Thread | None = None
        self._telling = threading.Lock()
        self._text = ""

    def first_bad(self, found: FirstBad, report: str, patch: str, *, order: int = 0) -> None:
        """Tell of the first bad value of this rank, after the ranks agreed where there are several."""
        self._text = _joined(report, patch)
        if engines.world_size() == 1:
            self._tell(None)
            return
        sighting = Sighting(found=found, order=order)
        self._thread = threading.Thread(target=self._agree, args=(sighting,), name="dsdoctor", daemon=True)
        self._thread.start()
        atexit.register(self.finish)

    def again(self, report: str, patch: str) -> None:
        """Tell of the same trouble in a later batch, of which there are frames."""
        self._say(_joined("It came back in a later batch, of which there are frames:", report, patch))

    def warning(self, text: str) -> None:
        """Tell of something that is no bad value."""
        self._say(f"dsdoctor: {text}")

    def trace(self, text: str) -> None:
        """The frames of a batch that is traced."""
        self._say(text)

    def finish(self) -> None:
        """Wait for the ranks' agreement, no longer than its deadline and a little; then tell without it."""
        if self._thread is not None:
            self._thread.join(DEADLINE + _GRACE)
            self._thread = None
            atexit.unregister(self.finish)
            self._tell(None)

    def _agree(self, sighting: Sighting) -> None:
        self.agreement = agree(sighting, name=self._name, deadline=DEADLINE)
        self._tell(self.agreement, printed=self.agreement.first.found.rank == sighting.found.rank)

    def _tell(self, agreement: Agreement | None, *, printed: bool = True) -> None:
        """Print or write the report, once."""
        with self._telling:
            text, self._text = self._text, ""
        if text:
            text = _joined(text, agreement.text() if agreement is not None else "")
            _print(text) if printed else self._write(text)

    def _say(self, text: str) -> None:
        if engines.rank() == 0:
            _print(text)
        else:
            self._write(text)

    def _write(self, text: str) -> None:
        """Add to this rank's own file. A folder that cannot be written costs the text, not the run."""
        try:
            self._out.mkdir(parents=True, exist_ok=True)
            with open(self._out / f"rank{engines.rank()}-{os.getpid()}.txt", "a", encoding="utf-8") as file:
                file.write(text + "\n\n")
        except OSError as error:
            print(f"dsdoctor: cannot write {self._out}: {error}", file=sys.stderr, flush=True)


def _joined(*parts: str) -> str:
    return "\n\n".join(part for part in parts if part)


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
