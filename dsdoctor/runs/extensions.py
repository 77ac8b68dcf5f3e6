"""One cache of compiled DeepSpeed ops for all runs of one Python, torch and DeepSpeed, apart from the user's.

A build takes from half a minute to some minutes, so it is shared. A build that was killed leaves a `lock` file behind,
on which every later process would wait for ever without a word: such files are removed. A process that builds has
its lock file open until it is done, so a lock that nobody has open is a dead one's.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
import sys
import tempfile
from pathlib import Path

from dsdoctor.machine.versions import installed

VARIABLE = "TORCH_EXTENSIONS_DIR"


def cache_folder(accelerator: str = "auto", root: Path | None = None) -> Path:
    """Where the ops are built.

    `accelerator` keeps CPU builds on a GPU machine apart from those for the GPU. Two environments with equal versions
    include headers from different folders, so in one cache each would rebuild what the other has just built.
    """
    versions = [f"py{sys.version_info.major}.{sys.version_info.minor}"]
    versions += [f"{name}{installed(name) or '-none'}" for name in ("torch", "deepspeed")]
    environment = hashlib.sha256(sys.prefix.encode("utf-8", "surrogateescape")).hexdigest()[:8]
    name = "-".join([*versions, accelerator, environment])
    return (root or _own_temporary_folder()) / "extensions" / re.sub(r"[^\w.+-]", "_", name)


def prepared(folder: Path) -> Path:
    """The cache, created where needed, without locks of killed builds."""
    folder.mkdir(parents=True, exist_ok=True)
    waited_for(folder)
    return folder


def waited_for(folder: Path) -> bool:
    """True if ranks may be waiting without a word for a build in the cache: of this run or of another one, or for one
    that was killed, whose lock is removed here so that they go on. torch keeps one folder an op, its `lock` in it
    (torch.utils.file_baton). To be asked only where nothing has moved for a while: a build that ends closes its lock
    before it removes it, and fails if the lock is gone in between.
    """
    locks = set(folder.glob("*/lock"))
    for lock in locks - _open_files() if locks else ():
        with contextlib.suppress(OSError):
            lock.unlink()
    return bool(locks)


def _open_files() -> set[Path]:
    """Files that processes of this user have open."""
    found = set()
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):  # ended meanwhile, or of another user
            found.add(Path(os.readlink(descriptor)))
    return found


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
