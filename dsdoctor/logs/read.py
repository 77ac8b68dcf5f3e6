"""Read the logs of a job: one pass over each source, one story out of all of them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dsdoctor.logs.facts import LogFacts
from dsdoctor.logs.scan import Scanner
from dsdoctor.logs.source import Source, Unreadable, blocks, find, is_binary
from dsdoctor.logs.story import Story

__all__ = ["Unreadable", "read_logs"]


def read_logs(paths: Sequence[str | os.PathLike[str]], *, config: Mapping[str, Any] | None = None) -> LogFacts:
    """What these logs say. A folder stands for all logs in it, `-` for standard input.

    `config` is the ds_config of the job where the user has it; one that stands in the log is nearer to the truth.
    Raises Unreadable if nothing at all can be read; what could not be read besides is in `LogFacts.unreadable`. Where
    all there is is empty or no text, that is said there too.
    """
    sources = find(paths)
    story = Story(config=config)
    silent = [reason for source in sources if (reason := _read_one(source, story))]
    if len(silent) + len(story.unreadable) == len(sources):
        story.unreadable.extend(silent)
    if story.unreadable and story.lines == 0 and not silent:
        raise Unreadable(story.unreadable[0])
    return story.facts(tuple(source.name for source in sources))


def _read_one(source: Source, story: Story) -> str:
    """Read one source; why there was nothing to read in it, if so."""
    head = b""

    def watched() -> Iterator[bytes]:
        nonlocal head
        for block in blocks(source):
            head = head or block
            yield block

    before = story.tick()
    try:
        Scanner(source, story).scan(watched())
    except Unreadable as error:
        story.unreadable.append(str(error))
        return ""
    if not head:
        return f"{source.name}: empty"
    return f"{source.name}: no text" if story.tick() == before + 1 and is_binary(head) else ""
