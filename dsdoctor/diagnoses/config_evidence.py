"""What the rules on the ds_config share: pointing at a key, joining evidence, finding the exception that proves it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

from dsdoctor.case import Case
from dsdoctor.diagnoses import context
from dsdoctor.dsconfig.facts import ConfigFacts, ConfigSyntaxError, Position
from dsdoctor.finding import Evidence
from dsdoctor.runs.facts import Failure

_LONGEST_LINE = 100
RESOLVERS = ("transformers", "accelerate")
"""Frameworks that replace "auto" and that read the file with `json.load`."""


def at_key(config: ConfigFacts, key: str, text: str = "") -> Evidence:
    """The key's place in the file with `text` or its source line; the key alone for a config without positions.

    A key that the file does not have is pointed at by the section that it would stand in.
    """
    where = _place(config, key)
    if where is None:
        return Evidence(source=config.path, text=text or shown(config, key))
    line = config.source_lines[where.line - 1]
    return Evidence(source=config.path, line=where.line, column=where.column, text=text or _excerpt(line, where.column))


def _place(config: ConfigFacts, key: str) -> Position | None:
    """Where the key stands, else the nearest section around it that does, else the beginning of the text."""
    while key:
        if (found := config.where(key)) is not None:
            return found
        key = key.rpartition(".")[0]
    begins = next((number for number, line in enumerate(config.source_lines, 1) if line.strip()), None)
    return Position(line=begins, column=1) if begins is not None and config.positions else None


def _excerpt(line: str, column: int) -> str:
    """A source line, or its part from the column on where all of the config stands on one line."""
    if len(line) <= _LONGEST_LINE:
        return line.strip()
    rest = line[column - 1 :]
    return "… " + (rest if len(rest) <= _LONGEST_LINE else f"{rest[:_LONGEST_LINE]} …")


def shown(config: ConfigFacts, key: str) -> str:
    """`key: value` as JSON, sections and long values cut short."""
    value = config.value(key)
    text = "{...}" if isinstance(value, dict) else as_json(value)
    return f"{key}: {text if len(text) <= 60 else text[:57] + '...'}"


def as_json(value: Any) -> str:
    """A value as the config file would hold it."""
    return json.dumps(value, ensure_ascii=False, default=str)


def described(error: ConfigSyntaxError) -> str:
    """Place and message of a syntax error in one line."""
    return f"line {error.line}, column {error.column}: {error.message}"


def at_error(config: ConfigFacts, error: ConfigSyntaxError) -> Evidence:
    """The source line of a syntax error; the message where there is nothing on that line."""
    return Evidence(
        source=config.path, line=error.line, column=error.column, text=error.text.strip()[:120] or error.message
    )


def matching(case: Case, pattern: str) -> Iterator[tuple[Failure, re.Match[str]]]:
    """The exceptions of the job whose `Type: message` matches; one per message, since ranks repeat each other."""
    seen = set()
    for failure in everyone(case):
        match = re.search(pattern, f"{failure.type}: {failure.message}", re.DOTALL)
        if match is not None and failure.message not in seen:
            seen.add(failure.message)
            yield failure, match


def everyone(case: Case) -> Iterator[Failure]:
    """The job's exceptions with those they were raised from."""
    for failure in context.failures(case):
        yield failure
        yield from failure.chain


def raised(failure: Failure) -> Evidence:
    """The exception as evidence."""
    return context.evidence(failure)


def as_list(names: Iterable[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    *most, last = list(names)
    return f"{', '.join(most)} and {last}" if most else last
