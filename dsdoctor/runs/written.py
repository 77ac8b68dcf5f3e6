"""What a script wrote in its working directory: two listings of it, before and after, compared."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

_MOST = 20_000
"""Entries looked at; a larger working directory is compared as far as that."""
_SKIPPED = {".git", "__pycache__", ".venv", "node_modules"}

Listing = Mapping[str, tuple[int, int]]


def listing(root: str | Path, *, leave_out: Path) -> Listing:
    """Path relative to `root` -> (mtime in ns, size in bytes) of the files below it, without the folder `leave_out`."""
    found: dict[str, tuple[int, int]] = {}
    for path in _files(Path(root), leave_out.resolve()):
        try:
            status = path.stat()
        except OSError:
            continue
        found[str(path.relative_to(root))] = (status.st_mtime_ns, status.st_size)
        if len(found) >= _MOST:
            break
    return found


def changed(before: Listing, after: Listing) -> tuple[str, ...]:
    """Files that are new or were changed, sorted."""
    return tuple(sorted(path for path, seen in after.items() if before.get(path) != seen))


def _files(root: Path, leave_out: Path) -> Iterator[Path]:
    for folder, folders, files in os.walk(root):
        here = Path(folder)
        folders[:] = sorted(f for f in folders if f not in _SKIPPED and (here / f).resolve() != leave_out)
        yield from (here / name for name in sorted(files))
