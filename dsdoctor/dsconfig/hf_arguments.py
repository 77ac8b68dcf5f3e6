"""Values of Hugging Face's TrainingArguments on a script's command line, as HfArgumentParser reads them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

_SWITCHES = {"true": True, "false": False}


def parse(arguments: Sequence[str]) -> dict[str, Any]:
    """`--name value`, `--name=value` and bare `--switch` as a dict; dashes in names become underscores.

    Values are numbers and booleans where they look like them, else text; a name given twice keeps the last value, one
    with several values a list.
    """
    found: dict[str, Any] = {}
    name: str | None = None
    for word in arguments:
        option = re.fullmatch(r"--([A-Za-z][\w-]*)(?:=(.*))?", word, re.DOTALL)
        if option is None:
            if name is not None:
                found[name] = _extended(found[name], _value(word))
            continue
        name = option.group(1).replace("-", "_")
        found[name] = True
        if option.group(2) is not None:
            found[name] = _value(option.group(2))
            name = None
    return found


def _extended(before: Any, value: Any) -> Any:
    if before is True:
        return value
    return [*before, value] if isinstance(before, list) else [before, value]


def _value(word: str) -> Any:
    if word.lower() in _SWITCHES:
        return _SWITCHES[word.lower()]
    for convert in (int, float):
        try:
            return convert(word)
        except ValueError:
            continue
    return word
