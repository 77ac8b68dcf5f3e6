"""One cache of compiled DeepSpeed ops for all runs of one Python, torch and DeepSpeed, apart from the user's.

A build takes from half a minute to some minutes, so it is shared. A build that was killed leaves a `lock` file behind,
on which every later process would wait for ever without a word: such files are removed, but only while no other run
uses the cache. Whoever uses it holds a shared lock on a file in it; the kernel frees that however the process ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import os
import re
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

VARIABLE = "TORCH_EXTENSIONS_DIR"
_USERS = ".in-use"


def cache_folder(accelerator: str = "auto", root: Path | None = None) -> Path:
    """Where the ops are built. `accelerator` keeps CPU builds on a GPU machine apart from those for the GPU."""
    versions = [f"py{sys.version_info.major}.{sys.version_info.minor}"]
    versions += [f"{name}{_version(name)}" for name in ("torch", "deepspeed")]
    name = "-".join([*versions, accelerator])
    return (root or _own_temporary_folder()) / "extensions" / re.sub(r"[^\w.+-]", "_", name)


@contextlib.contextmanager
def in_use(folder: Path) -> Iterator[Path]:
    """Create the cache where needed, clear locks of killed builds from it, and mark it as used meanwhile."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / _USERS, "a", encoding="utf-8") as users:
        if _lock(users, fcntl.LOCK_EX | fcntl.LOCK_NB):
            _clear_stale_locks(folder)
        _lock(users, fcntl.LOCK_SH)
        yield folder


def _lock(file: IO[str], how: int) -> bool:
    """Take or change the lock. Exclusive holders keep it for an instant only, so waiting for a shared one is short."""
    try:
        fcntl.flock(file, how)
    except OSError:  # held by another run, or a file system without locks
        return False
    return True


def _clear_stale_locks(folder: Path) -> None:
    """torch keeps one folder an op, with a file `lock` in it while it builds (torch.utils.file_baton)."""
    for lock in folder.glob("*/lock"):
        with contextlib.suppress(OSError):
            lock.unlink()


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "-none"


def _own_temporary_folder() -> Path:
    """`dsdoctor-UID` in the system's temporary folder; one with another name if that one is not ours alone.

    Shared objects are loaded from it, so nobody else may be able to put any there.
    """
    folder = Path(tempfile.gettempdir()) / f"dsdoctor-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    private = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022
    return folder if private else Path(tempfile.mkdtemp(prefix="dsdoctor-"))
