"""Versions of installed distributions, by their metadata: nothing of them is imported."""

from __future__ import annotations

from collections.abc import Iterable


def installed(distribution: str) -> str | None:
    """The version that is installed, None where it is not."""
    from importlib import metadata  # takes longer than most commands do without it

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def installed_of(distributions: Iterable[str]) -> dict[str, str]:
    """Those that are installed, with their versions."""
    return {name: version for name in distributions if (version := installed(name)) is not None}
