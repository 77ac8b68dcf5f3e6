"""What went through the last module calls, as numbers, written out only when somebody reads it. Rank processes only.

The layout is that of the well-known report of the Transformers class: a header line with the qualified name and the
class of the module, then one line a parameter, input and output with its smallest and largest magnitude.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dsdoctor.numerics.stats import Range

_INDENT = " " * 17
HEADING = f"{'abs min':8} {'abs max':8} metadata"


@dataclass(frozen=True, slots=True)
class Row:
    """One line: what was measured, or in words why nothing was."""

    label: str
    range: Range | None = None
    note: str = "not a tensor"

    def text(self) -> str:
        if self.range is None:
            return f"{self.note:>17} {self.label}"
        return f"{self.range.low:8.2e} {self.range.high:8.2e} {self.label}"

    def kinds(self) -> list[str]:
        """nan, inf, both or nothing."""
        kind = self.range.kind if self.range is not None else None
        return sorted(kind.split("+"), reverse=True) if kind is not None else []


@dataclass(frozen=True, slots=True)
class Frame:
    """One module call. `before` are lines that the report has above it, where a batch begins."""

    name: str
    class_name: str
    rows: tuple[Row, ...]
    before: str = ""

    def text(self) -> str:
        head = f"{_INDENT} {self.name} {self.class_name}"
        lines = [head, *(row.text() for row in self.rows)]
        return "\n".join([self.before, *lines] if self.before else lines)


class FrameLog:
    """The last module calls, at most `limit`, and those of the running batch where it is to be traced.

    `taken` counts the calls since it was set to 0.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.taken = 0
        self._last: deque[Frame] = deque(maxlen=limit)
        self._traced: list[Frame] | None = None
        self._before = ""

    def add(self, frame: Frame) -> None:
        if self._before:
            frame, self._before = replace(frame, before=self._before), ""
        self.taken += 1
        self._last.append(frame)
        if self._traced is not None:
            self._traced.append(frame)

    def announce(self, lines: str) -> None:
        """Write these lines above the next frame."""
        self._before = lines

    def last(self) -> tuple[Frame, ...]:
        return tuple(self._last)

    def take(self) -> tuple[Frame, ...]:
        """The last frames, which are dropped."""
        frames = tuple(self._last)
        self._last.clear()
        return frames

    def start_trace(self) -> None:
        """Keep every frame from here on, until `end_trace`."""
        self._traced = []

    def end_trace(self) -> tuple[Frame, ...] | None:
        """The frames since `start_trace`, or None if nothing is traced."""
        traced, self._traced = self._traced, None
        return None if traced is None else tuple(traced)


def starting_lines(batch: int) -> str:
    """What stands above the first frame of a batch."""
    return f"\n\n{_INDENT} *** Starting batch number={batch} ***\n{HEADING}"


def hit_text(frames: Sequence[Frame], batch: int) -> str:
    """The report of the frames before a hit."""
    lines = [f"Detected inf/nan during batch_number={batch}", f"Last {len(frames)} forward frames:", HEADING]
    return "\n".join([*lines, *(frame.text() for frame in frames)])


def batch_text(frames: Sequence[Frame], batch: int) -> str:
    """All frames of one traced batch."""
    lines = [starting_lines(batch), *(frame.text() for frame in frames)]
    return "\n".join([*lines, f"{_INDENT} *** Finished batch number={batch} ***\n\n"])
