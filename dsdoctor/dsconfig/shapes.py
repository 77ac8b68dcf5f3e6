"""The shapes that a value of a ds_config can have, as far as DeepSpeed's code tells them apart.

The schema says for each key which shapes a release refuses. That was found out by trying: `PROBES` are the values that
`dsconfig.introspect` puts at each key, and `shape_of` says which probe stands for a user's value.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

LARGEST_FROM_FLOAT = 2.0**63
"""pydantic makes no whole number this large out of a float."""
PROBES: Mapping[str, tuple[Any, ...]] = {
    "null": (None,),
    "true": (True,),
    "false": (False,),
    "zero": (0,),
    "one": (1,),
    "whole": (2, 3, 4, 8, 16, 64, 1000),
    "negative": (-1, -2),
    "zero-float": (0.0,),
    "one-float": (1.0,),
    "whole-float": (2.0, 3.0, 1e8),
    "huge-float": (1e20,),
    "fraction": (0.5, 0.25, 1.5, -0.5),
    "negative-float": (-1.0, -2.0),
    "not-finite": (float("nan"), float("inf")),
    "empty-text": ("",),
    "digits": ("1", "2", "3", "8", "0.5"),
    "empty-list": ([],),
    "texts": (["a"],),
    "list": ([1], [0.5], [[1]], [None]),
    "empty-object": ({},),
    "object": ({"x": 1},),
}
"""The values tried for each shape but "word". A shape counts as refused if all of them are."""


def shape_of(value: Any) -> str:
    """The shape of a JSON value; "word" for a text that is neither empty nor a number."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, (int, float)):
        return _number(value)
    if isinstance(value, str):
        return "empty-text" if not value else "digits" if _is_number(value) else "word"
    if isinstance(value, Mapping):
        return "object" if value else "empty-object"
    return "empty-list" if not value else "texts" if all(isinstance(item, str) for item in value) else "list"


def _number(value: float) -> str:
    if not math.isfinite(value):
        return "not-finite"
    if value != int(value):
        return "fraction"
    shape = "negative" if value < 0 else "zero" if value == 0 else "one" if value == 1 else "whole"
    if not isinstance(value, float):
        return shape
    return "huge-float" if value >= LARGEST_FROM_FLOAT else f"{shape}-float"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
