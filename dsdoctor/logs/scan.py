"""One pass over one source: find the lines that mean something, have them read, and skip the others.

A long block is looked at as a whole first: which of its lines mean something by their kind (`dsdoctor.logs.shapes`),
and of the steps of training, which a series keeps (`dsdoctor.logs.bulk`). Those are read. While a traceback or a config
is open, every line is. Memory does not grow with the log.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import repeat
from typing import TYPE_CHECKING

from dsdoctor.logs import grammar
from dsdoctor.logs.line_values import is_training, told, values
from dsdoctor.logs.lines import LineReader
from dsdoctor.logs.shapes import DONE, STEP, Kinds, Meaning, Step
from dsdoctor.logs.source import Source
from dsdoctor.logs.story import Story
from dsdoctor.logs.wrapped import joined, width

if TYPE_CHECKING:
    from dsdoctor.logs.block import Block

SHORT = 1 << 16
"""Bytes of a block that is read line by line; a longer one is worth a look at the whole of it first."""
_PASTED = 1 << 20
"""Bytes of a log that may have been pasted from a terminal."""


class Scanner:
    """Reads the blocks of one source into a story."""

    def __init__(self, source: Source, story: Story) -> None:
        self._source = source
        self._story = story
        self._lines = LineReader(source, story)
        self._unfinished = False
        self._indent: bytes | None = None
        self._width: int | None = None
        self.kinds = Kinds(values, is_training)

    def scan(self, blocks: Iterable[bytes]) -> None:
        """Read all blocks, then close what is still open. Exceptions of `blocks` pass through, after the closing."""
        try:
            for block in blocks:
                self.feed(block)
        finally:
            self.close()

    def feed(self, data: bytes) -> None:
        """Read the next block of the source."""
        self._story.source = self._source.name
        if b"\0" in data:  # what is left where a file was cut back under a process that writes on
            data = data.replace(b"\0", b"")
        if not data:
            return
        if self._source.rank is not None:
            self._story.saw(self._source.rank)
        self._unfinished = not data.endswith(b"\n")
        if self._indent is None:
            self._indent = _indentation(data) if len(data) <= _PASTED else b""
        if self._indent:
            data = re.sub(rb"(?m)^" + self._indent, b"", data)
        if self._width is None:
            self._width = (len(data) <= _PASTED and width(_lines(data), told)) or 0
        if self._width or len(data) <= SHORT:
            self._feed_all(data)
        else:
            self._feed_long(data)

    def close(self) -> None:
        """The source has ended: whatever is open is complete."""
        self._story.source = self._source.name
        self._lines.close()
        self._story.lines += self._lines.line - 1 + self._unfinished
        if self._unfinished:
            self._story.unfinished.append((self._source.name, self._lines.line))

    def _feed_all(self, data: bytes) -> None:
        """Read all lines; those that a terminal broke as they were before."""
        lines = _lines(data)
        for text, count in joined(lines, self._width) if self._width else zip(lines, repeat(1)):
            self._lines.read(text)
            self._lines.line += count
            self._lines.attention -= count
        self._lines.line -= self._unfinished

    def _feed_long(self, data: bytes) -> None:
        from dsdoctor.logs.block import Block

        block, first, index = Block(data, self.kinds.numbers), self._lines.line, 0
        while index < len(block):
            if self._lines.attention > 0:
                self._lines.read(_text(block, index))
                index += 1
                self._go_on(first + block.lines_before([index])[0])
            else:
                index = self._regular(block, first, index)

    def _go_on(self, line: int) -> None:
        self._lines.attention -= line - self._lines.line
        self._lines.line = line

    def _regular(self, block: Block, first: int, start: int) -> int:
        """Read what means something, up to the end of the block or a line from which on all are to be read."""
        from dsdoctor.logs.bulk import choose

        meanings = self.kinds.meanings
        choice = choose(block, start, meanings, self._story.series, whole_head=self._lines.expects_more)
        self._story.saw(*choice.ranks())
        order, passed = choice.ordered()
        end = len(block)
        for index, lines, before in zip(order, block.lines_before(order), passed, strict=False):
            self._passed(before)
            self._lines.line = first + lines
            meaning = meanings[block.numbers[index]]
            if index in choice.glanced:
                self._glance(block.text(index), meaning)
                continue
            self._lines.read(_text(block, index), meaning.rows if meaning is not None else grammar.ALL)
            if self._lines.attention > 0:
                end = index + 1
                break
        else:
            self._passed(passed[-1])
        for row, rank, count in choice.counted(end):
            self._story.again(row.kind, self._source.rank if rank is None else rank, count)
        self._go_on(first + block.lines_before([end])[0])
        return end

    def _glance(self, text: bytes, meaning: Meaning) -> None:
        """Take the steps of the bars in a line, and the values of its step, without reading it as a whole."""
        match = meaning.pattern.search(text) if isinstance(meaning, Step) else None
        end = match.end() if match is not None else len(text)
        self._bars(text[:end])
        if isinstance(meaning, Step) and match is not None:
            segment = text[text.rfind(b"\r", 0, match.start()) + 1 :].partition(b"\r")[0]
            self._tell(meaning, match, segment)
            self._bars(text[end:])

    def _bars(self, text: bytes) -> None:
        for done in DONE.findall(text):
            self._lines.bar_at(int(done))

    def _tell(self, step: Step, match: re.Match[bytes], segment: bytes) -> None:
        groups = match.groups()
        self._count(step, 1)
        rank = int(groups[0]) if step.ranked else self._source.rank
        if rank is not None:
            self._story.saw(rank)
        told = dict(zip(step.names, groups[step.ranked :], strict=True))
        if step.numbered:
            self._lines.step_at(float(told[STEP]))
        line, source, now = self._lines.line, self._source.name, self._story.step
        for name in step.series:
            self._story.builder(name).add(now, float(told[name]), line, source, rank, segment)

    def _count(self, step: Step, count: int) -> None:
        if step.counted:
            self._lines.told_dicts(count)

    def _passed(self, passed: Iterable[tuple[Step, int]]) -> None:
        for step, count in passed:
            self._count(step, count)
            for name in step.series:
                self._story.builder(name).passed(count)


def _indentation(data: bytes) -> bytes:
    """The blanks that all lines begin with, as in a log that was pasted into a text."""
    least = min((line for line in data.splitlines() if line.strip()), key=_blanks, default=b"")
    return least[: _blanks(least)]


def _blanks(line: bytes) -> int:
    return len(line) - len(line.lstrip(b" "))


def _lines(data: bytes) -> list[str]:
    return [line.rstrip("\r") for line in data.decode("utf-8", "replace").removesuffix("\n").split("\n")]


def _text(block: Block, index: int) -> str:
    return block.text(index).rstrip(b"\r").decode("utf-8", "replace")
