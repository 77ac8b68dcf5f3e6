"""A ds_config that stands in a log: DeepSpeed's own dump, or a file that was printed."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

MAX_LINES = 600
DEEPSPEED_KEYS = {
    "zero_optimization", "fp16", "bf16", "train_batch_size", "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps", "zero_allow_untested_optimizer", "gradient_clipping", "bfloat16",
}  # fmt: skip
ONE_LINE_KEYS = ("train_batch_size", "zero_optimization")
"""Keys of which one stands in a config that is printed in one line."""

BEGINS = re.compile(r"(?:^|[=:] ?|\s)\{\s*$")
_FIRST_KEY = re.compile(r'^\s*["\']?(?P<key>\w+)["\']?\s*:')


class ConfigBlock:
    """Collects the lines of one block in braces until it is closed."""

    def __init__(self, line: int) -> None:
        self.first_line = line
        self._lines: list[str] = ["{"]
        self._depth = 1
        self.marks: dict[str, int] = {}
        """Line of each top-level key."""

    def feed(self, text: str, line: int) -> Mapping[str, Any] | bool:
        """The config once it is complete; True while more is needed; False if this is none."""
        if self._depth == 1 and (key := _FIRST_KEY.match(text)) is not None:
            self.marks.setdefault(key["key"], line)
        self._lines.append(text)
        self._depth += text.count("{") - text.count("}")
        if self._depth > 0:
            return len(self._lines) < MAX_LINES and (len(self._lines) > 3 or '"' in text or "}" in text or "'" in text)
        return parse("\n".join(self._lines)) or False


def parse(text: str) -> Mapping[str, Any] | None:
    """The text as a ds_config, None if it is not one."""
    text = text[: text.rfind("}") + 1]
    try:
        value = json.loads(text)
    except ValueError:
        try:
            value = ast.literal_eval(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return None
    return value if isinstance(value, dict) and DEEPSPEED_KEYS & value.keys() else None
