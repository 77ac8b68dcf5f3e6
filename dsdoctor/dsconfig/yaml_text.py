"""YAML, for the files of Accelerate and Transformers: the value of a text, and where its keys stand.

PyYAML comes with both of them; where it is missing there is no YAML of theirs to read either.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


class YamlUnreadable(Exception):
    """The text is not YAML, or there is no reader for it."""


def load(text: str) -> Any:
    """The value of a YAML text. Raises YamlUnreadable."""
    yaml = _library()
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise YamlUnreadable(" ".join(str(error).split())) from None


def positions(text: str) -> dict[str, tuple[int, int]]:
    """Line and column, both from 1, of every dotted key of a text that `load` reads."""
    yaml = _library()
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise YamlUnreadable(" ".join(str(error).split())) from None
    return dict(_keys(root, "")) if root is not None else {}


def _keys(node: Any, prefix: str) -> Iterator[tuple[str, tuple[int, int]]]:
    pairs = node.value if node.id == "mapping" else ()
    for key, value in pairs:
        path = f"{prefix}{key.value}"
        yield path, (key.start_mark.line + 1, key.start_mark.column + 1)
        yield from _keys(value, f"{path}.")


def _library() -> Any:
    try:
        import yaml
    except ImportError:
        raise YamlUnreadable("reading YAML needs PyYAML, which is not installed") from None
    return yaml
