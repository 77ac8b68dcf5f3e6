"""A control group with a memory limit, made for a test where this machine lets us, and gone after it."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

_MOUNT = Path("/sys/fs/cgroup")


@contextlib.contextmanager
def memory_group(limit: int) -> Iterator[Path]:
    """The folder of a new group that may use `limit` bytes. Skips the test where none can be made."""
    version_1 = (_MOUNT / "memory" / "memory.limit_in_bytes").exists()
    folder = (_MOUNT / "memory" if version_1 else _MOUNT) / f"dsdoctor-test-{os.getpid()}-{time.monotonic_ns()}"
    try:
        folder.mkdir()
        (folder / ("memory.limit_in_bytes" if version_1 else "memory.max")).write_text(str(limit))
    except OSError as error:
        with contextlib.suppress(OSError):
            folder.rmdir()
        pytest.skip(f"no memory cgroup can be made here: {error}")
    try:
        yield folder
    finally:
        _remove(folder)


def _remove(folder: Path) -> None:
    """A group can be removed once its last process is reaped."""
    deadline = time.monotonic() + 20
    while True:
        try:
            folder.rmdir()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
