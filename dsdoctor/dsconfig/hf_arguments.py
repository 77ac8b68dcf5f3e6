"""Values of Hugging Face's TrainingArguments: from a command line, as HfArgumentParser reads it, or from a file."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dsdoctor.dsconfig import yaml_text

_SWITCHES = {"true": True, "false": False}
_FILES = (".json", ".yaml", ".yml")
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle")


class ArgumentsUnreadable(Exception):
    """The arguments cannot be read; `str()` is one line for the user."""


def given(text: str) -> dict[str, Any]:
    """What `--hf-args` says: the name of a JSON or YAML file, or words as on a command line.

    Raises ArgumentsUnreadable, for a pickle such as training_args.bin too: loading one runs what is in it.
    """
    if text.lower().endswith(_PICKLES):
        raise ArgumentsUnreadable(f"{text} is a pickle, which is never read; give the arguments as JSON, YAML or words")
    try:
        if not text.lower().endswith(_FILES) or " " in text.strip():
            return parse(shlex.split(text))
        read = Path(text).read_text(encoding="utf-8")
        data = json.loads(read) if text.lower().endswith(".json") else yaml_text.load(read)
    except OSError as error:
        raise ArgumentsUnreadable(f"cannot read the arguments: {text}: {error.strerror or error}") from None
    except (ValueError, RecursionError, yaml_text.YamlUnreadable) as error:
        raise ArgumentsUnreadable(f"cannot read the arguments {text}: {' '.join(str(error).split())}") from None
    if not isinstance(data, dict):
        raise ArgumentsUnreadable(f"cannot read the arguments {text}: the file holds no object")
    return {str(name): value for name, value in data.items()}


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
