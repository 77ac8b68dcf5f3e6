"""The values that a line holds: where they stand, what they are called, times and settings. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

from dsdoctor.logs import grammar
from dsdoctor.logs.rows import NUMBER, LinePattern
from dsdoctor.logs.shapes import SCALE, SKIPPED, STEP

_TIME = re.compile(r"(?P<date>\d{4}-\d\d-\d\d)[T ](?P<clock>\d\d:\d\d:\d\d)(?:[.,](?P<part>\d+))?")
_GLOG = re.compile(r"\b[IWEF](?P<month>\d\d)(?P<day>\d\d) (?P<clock>\d\d:\d\d:\d\d)\.(?P<part>\d+)")
PAIR = re.compile(rf"['\"](?P<key>loss|grad_norm|learning_rate|step)['\"]: ['\"]?(?P<value>{NUMBER})\b")
NAMED_VALUE = re.compile(
    rf"(?i){grammar.NOT_OF_A_TEST}\b(?P<key>lm loss|loss scale|loss|grad[_ ]?norm|learning[_ ]rate|lr)\b['\"]?[ :=|]*"
    rf"(?:tensor\()?(?P<value>{NUMBER})\b"
)
_SERIES = {
    "lm loss": "loss",
    "loss": "loss",
    "grad norm": "grad_norm",
    "grad_norm": "grad_norm",
    "gradnorm": "grad_norm",
}
_SERIES |= {"learning rate": "lr", "learning_rate": "lr", "lr": "lr"}
_TRAINING_BAR = re.compile(r"(?i)^(?!.*(?:tokeniz|dataset|\bsplit\b|loading)).*\b(?:epoch|train\w*|steps?|iter\w*)\b")


def is_training(title: str) -> bool:
    """True if a bar of that title shows training."""
    return _TRAINING_BAR.search(title) is not None


def told(text: str) -> set[str]:
    """What a text tells: the kinds of lines and the names of values in it."""
    kinds = {row.kind for row, _ in grammar.matches(text)}
    return kinds | {pair["key"] for pair in PAIR.finditer(text)}


def values(row: LinePattern, match: re.Match[str], text: str) -> list[tuple[tuple[int, int], str]] | None:
    """Where in a line its values are and what they are called, None if such a line is to be read by itself."""
    if row.kind == "bar" or row.kind in grammar.ONLY_COUNTED:
        return []
    if row.kind == "figures":
        return [(match.span(group), grammar.FIGURES[group]) for group, text in match.groupdict().items() if text]
    step = [(match.span("step"), STEP)] if "step" in match.re.groupindex else []
    if row.kind in ("skip-count", "skips-since"):
        others = (("skipped", SKIPPED), ("scale", SCALE))
        return step + [(match.span(group), name) for group, name in others if match.groupdict().get(group)]
    if row.kind == "hf-dict":
        return pairs(PAIR, text, match.start())
    if row.kind in grammar.STEPS:
        return step + pairs(NAMED_VALUE, text, 0 if row.kind == "megatron" else match.start())
    return step if row.kind == "ds-step" else None


def pairs(pattern: re.Pattern[str], text: str, start: int) -> list[tuple[tuple[int, int], str]]:
    """The named values in a text, each name once."""
    found: dict[str, tuple[int, int]] = {}
    for pair in pattern.finditer(text, start):
        name = STEP if pair["key"] == STEP else _SERIES.get(pair["key"].lower())
        if name is not None:
            found.setdefault(name, pair.span("value"))
    return [(span, name) for name, span in found.items()]


def scale_settings(fields: Mapping[str, str]) -> dict[str, Any]:
    """The keys of the fp16 section that lines of DeepSpeed's dump tell, by dotted names."""
    settings: dict[str, Any] = {}
    for name, text in fields.items():
        if name == "enabled":
            settings["fp16.enabled"] = text == "True"
        elif name == "initial_dynamic_scale":
            settings["fp16.initial_scale_power"] = math.log2(int(text)) if int(text) > 0 else 0
        elif name != "loss_scale" or float(text) != 1:  # 1 is what the dump of an engine without a scale says
            settings[f"fp16.{name}"] = float(text)
    return settings


def time_of(text: str) -> float | None:
    """Seconds since the epoch, taken as UTC; only differences matter."""
    match = _TIME.search(text, 0, 120)
    try:
        if match is not None:
            base = datetime.fromisoformat(f"{match['date']}T{match['clock']}").replace(tzinfo=timezone.utc)
            return base.timestamp() + float(f"0.{match['part'] or 0}")
        match = _GLOG.search(text, 0, 120)
        if match is not None:
            stamp = f"{datetime.now(timezone.utc).year}-{match['month']}-{match['day']}T{match['clock']}"
            return datetime.fromisoformat(stamp).replace(tzinfo=timezone.utc).timestamp() + float(f"0.{match['part']}")
    except ValueError:
        return None
    return None


def float_of(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None
