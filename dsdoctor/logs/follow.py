"""Logs that are still being written: read what is there, then what comes, through rotation and truncation."""

from __future__ import annotations

import copy
import os
import select
from collections.abc import Mapping, Sequence
from typing import IO, Any

from dsdoctor.logs.facts import LogFacts
from dsdoctor.logs.scan import Scanner
from dsdoctor.logs.source import BLOCK, Source, Unreadable, Utf8, WholeLines, blocks, find, is_compressed, open_plain
from dsdoctor.logs.story import Story


class Follower:
    """Follows logs. Call `poll` again and again; `facts` says what is known if nothing more comes."""

    def __init__(self, paths: Sequence[str | os.PathLike[str]], *, config: Mapping[str, Any] | None = None) -> None:
        """Raises Unreadable as `dsdoctor.logs.read.read_logs` does."""
        self._paths = paths
        self._story = Story(config=config)
        self._tails: dict[str, _Tail] = {}
        self._find()
        if self._story.unreadable and len(self._story.unreadable) == len(self._tails):
            raise Unreadable(self._story.unreadable[0])

    @property
    def ended(self) -> bool:
        """True if nothing more can come: all inputs are pipes that were closed, or compressed files."""
        return all(tail.ended for tail in self._tails.values())

    def poll(self) -> bool:
        """Read what has come since the last call; True if anything has. Waits for nothing."""
        self._find()
        grown = [tail.poll() for tail in self._tails.values()]
        return any(grown)

    def facts(self) -> LogFacts:
        """What the logs say so far, as if they ended here."""
        tails = list(self._tails.values())
        shared = {id(tail.scanner.kinds): tail.scanner.kinds for tail in tails}
        story, scanners = copy.deepcopy((self._story, [tail.scanner for tail in tails]), shared)
        for tail, scanner in zip(tails, scanners, strict=True):
            if tail.rest:
                scanner.feed(tail.rest)
            scanner.close()
        return story.facts(tuple(self._tails))

    def _find(self) -> None:
        """Begin with the inputs that are new: a folder gets new files."""
        for source in find(self._paths) if not self._tails else self._again():
            if source.name not in self._tails:
                self._tails[source.name] = _Tail(source, self._story)

    def _again(self) -> list[Source]:
        try:
            return find([path for path in self._paths if os.path.isdir(path)])
        except Unreadable:
            return []


class _Tail:
    """One input that may grow, and the scanner that reads it."""

    def __init__(self, source: Source, story: Story) -> None:
        self._source = source
        self._story = story
        self.ended = False
        self._is_pipe = source.path is None or not source.path.is_file()
        self._stream: IO[bytes] | None = None
        self._begin()

    @property
    def rest(self) -> bytes:
        """The beginning of a line whose end has not come yet."""
        return self._lines.rest

    def poll(self) -> bool:
        """Read what has come; True if anything has."""
        read = self._read()
        if self._replaced():
            self._finish()
            self._begin()
            read = self._read() or read
        return read

    def _begin(self) -> None:
        self.scanner = Scanner(self._source, self._story)
        self._text = Utf8()
        self._lines = WholeLines()
        try:
            if is_compressed(self._source):
                self.ended = True
                for block in blocks(self._source):
                    self.scanner.feed(block)
            else:
                self._stream = open_plain(self._source)
        except Unreadable as error:
            self.ended = True
            self._story.unreadable.append(str(error))

    def _finish(self) -> None:
        """The file was replaced by another: what the old one said is complete."""
        if self.rest:
            self.scanner.feed(self.rest)
        self.scanner.close()
        if self._stream is not None:
            self._stream.close()

    def _read(self) -> bool:
        read = False
        while not self.ended and self._stream is not None:
            if self._is_pipe and not select.select([self._stream], [], [], 0)[0]:
                break
            data = os.read(self._stream.fileno(), BLOCK)
            if not data:
                self.ended = self._is_pipe
                break
            read = True
            if block := self._lines.feed(self._text.feed(data)):
                self.scanner.feed(block)
        return read

    def _replaced(self) -> bool:
        """True if the path names another file now, or the same one cut back."""
        if self._stream is None or self._source.path is None or self._is_pipe:
            return False
        try:
            there = os.stat(self._source.path)
        except OSError:
            return False  # moved away; what comes in its place may yet come
        ours = os.fstat(self._stream.fileno())
        at = os.lseek(self._stream.fileno(), 0, os.SEEK_CUR)
        return (there.st_dev, there.st_ino) != (ours.st_dev, ours.st_ino) or there.st_size < at
