"""Compare DeepSpeed versions."""

from __future__ import annotations

import re


def version_key(release: str) -> tuple[int, ...]:
    """The numbers of a version, for comparison: `0.19.8+cu121` is (0, 19, 8). Empty for what is no version."""
    match = re.match(r"\d+(?:\.\d+)*", release.strip())
    return tuple(int(part) for part in match.group().split(".")) if match else ()


def at_least(release: str, since: str) -> bool:
    """Whether a known release is `since` or newer; False where the release is not known."""
    key = version_key(release)
    return bool(key) and key >= version_key(since)


def in_range(release: str, since: str | None, until: str | None) -> bool:
    """Whether a known release lies between the two, both included; None leaves that end open."""
    key = version_key(release)
    if not key:
        return False
    return (since is None or key >= version_key(since)) and (until is None or key <= version_key(until))
