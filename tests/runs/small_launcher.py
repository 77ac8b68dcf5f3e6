"""A launcher of some lines in the place of torchrun: no torch in it, so that a start takes a moment only.

`python small_launcher.py NPROC COMMAND...` starts COMMAND as many times, with RANK and its kin set; when one ends, the
others are told to, as torchrun does. The exit code is that of the rank that failed, without its sign.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from dsdoctor.runs.launcher import LaunchPlan


def line(plan: LaunchPlan, port: int) -> list[str]:
    """To be put in the place of `launcher._torchrun`."""
    return [sys.executable, __file__, str(plan.nproc), sys.executable, "-m"]


def main() -> None:
    size, command = int(sys.argv[1]), sys.argv[2:]
    ranks = [_start(rank, size, command) for rank in range(size)]
    failed = False
    while any(rank.poll() is None for rank in ranks):
        if not failed and any(rank.poll() not in (None, 0) for rank in ranks):
            failed = True
            for rank in ranks:
                if rank.poll() is None:
                    os.killpg(rank.pid, signal.SIGTERM)
        time.sleep(0.02)
    sys.exit(max(abs(rank.returncode) for rank in ranks))


def _start(rank: int, size: int, command: list[str]) -> subprocess.Popen[bytes]:
    place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    return subprocess.Popen(command, env={**os.environ, **place}, start_new_session=True)


if __name__ == "__main__":
    main()
