"""Read the logs of a job: one pass over each source, one story out of all of them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from dsdoctor.logs.facts import LogFacts
from dsdoctor.logs.scan import Scanner
from dsdoctor.logs.source import Source, Unreadable, blocks, find
from dsdoctor.logs.story import Story

__all__ = ["Unreadable", "read_logs"]


def read_logs(paths: Sequence[str | os.PathLike[str]], *, config: Mapping[str, Any] | None = None) -> LogFacts:
    """What these logs say. A folder stands for all logs in it, `-` for standard input.

    `config` is the ds_config of the job where the user has it; one that stands in the log is nearer to the truth.
    Raises Unreadable if nothing at all can be read; what could not be read besides is in `LogFacts.unreadable`.
    """
    sources = find(paths)
    story = Story(config=config)
    for source in sources:
        _read_one(source, story)
    if story.unreadable and story.lines == 0:
        raise Unreadable(story.unreadable[0])
    return story.facts(tuple(source.name for source in sources))


def _read_one(source: Source, story: Story) -> None:
    try:
        Scanner(source, story).scan(blocks(source))
    except Unreadable as error:
        story.unreadable.append(str(error))
