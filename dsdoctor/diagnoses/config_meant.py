"""What a value of the ds_config was meant as: words without quotes, numbers and truth values written as a text."""

from __future__ import annotations

import ast
import math
import re
from typing import Any

from dsdoctor.dsconfig.shapes import LARGEST_FROM_FLOAT

_TRUE = ("1", "on", "t", "true", "y", "yes")
_FALSE = ("0", "off", "f", "false", "n", "no")


def literal(word: str, kind: str | None) -> Any:
    """What a word without quotes stands for, as far as its key takes that; None where it cannot be told."""
    if word.lower() in ("true", "false"):
        return word.lower() == "true"
    if kind == "str":
        return word
    try:
        value = ast.literal_eval(word)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return word if kind is None and word.isalpha() and word.lower() not in ("nan", "inf", "infinity") else None
    if isinstance(value, (tuple, list)):
        return list(value)
    number = isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))
    return value if number else None


def convert(value: Any, kind: str) -> Any:
    """The value as pydantic's lax mode converts it; None where it refuses it."""
    if kind == "str":
        return value if isinstance(value, str) else None
    if kind == "bool":
        return as_bool(value)
    if isinstance(value, bool):
        return int(value)
    if kind == "int":
        return as_int(value)
    try:
        return float(value) if isinstance(value, (int, float, str)) else None
    except ValueError:
        return None


def as_bool(value: Any) -> bool | None:
    """A truth value as pydantic spells it; None for anything else."""
    if isinstance(value, str):
        word = value.lower()
        return True if word in _TRUE else False if word in _FALSE else None
    return bool(value) if isinstance(value, (bool, int, float)) and value in (0, 1) else None


def as_int(value: Any) -> int | None:
    """A whole number as pydantic reads it; None for anything else."""
    if isinstance(value, int):
        return value
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) < LARGEST_FROM_FLOAT else None
    spelled = isinstance(value, str) and re.fullmatch(r"\s*[-+]?\d+(?:_\d+)*(?:\.0*)?\s*", value)
    return int(value.strip().partition(".")[0].replace("_", "")) if spelled else None


def of_text(value: Any, kind: str) -> Any:
    """The value that a text in quotes stands for, where it stands for one of the wanted kind."""
    if not isinstance(value, str):
        return None
    if kind == "bool":
        return as_bool(value.strip())
    try:
        number = float(value)
    except ValueError:
        return None
    if not math.isfinite(number):
        return None
    return int(number) if kind == "int" and number.is_integer() else number if kind == "float" else None
