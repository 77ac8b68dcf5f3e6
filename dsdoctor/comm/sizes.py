"""The sizes of messages that a ds_config makes, for the check. Pure.

Keys and defaults are those of DeepSpeed's ZeRO section (runtime/zero/config.py): buckets count elements, not bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_DEFAULT_BUCKET = 500_000_000
CPU_LIMIT = 1 << 22
"""Elements that a rehearsal on the CPU sends at most: gloo on one machine says no more of a gigabyte than of 16 MiB."""


@dataclass(frozen=True, kw_only=True)
class Message:
    """One size that the job will send: `collective` is `all_reduce` or `all_gather`, `key` is what makes it so."""

    collective: str
    elements: int
    key: str


def messages(config: Mapping[str, Any]) -> tuple[Message, ...]:
    """The largest messages of the job, none without a ZeRO section."""
    zero = config.get("zero_optimization")
    if not isinstance(zero, Mapping) or not _number(zero.get("stage")):
        return ()
    reduced = _number(zero.get("reduce_bucket_size")) or _DEFAULT_BUCKET
    found = [Message(collective="all_reduce", elements=reduced, key="zero_optimization.reduce_bucket_size")]
    gathered = "stage3_prefetch_bucket_size" if zero.get("stage") == 3 else "allgather_bucket_size"
    default = 50_000_000 if zero.get("stage") == 3 else _DEFAULT_BUCKET
    elements = _number(zero.get(gathered)) or default
    return (*found, Message(collective="all_gather", elements=elements, key=f"zero_optimization.{gathered}"))


def _number(value: object) -> int:
    """`5e8` is read as a float; "auto" and what is no number count as not given."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return 0
    return int(value) if 0 < value < 1e15 else 0
