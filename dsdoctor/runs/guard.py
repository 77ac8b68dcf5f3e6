"""Run as `python -I guard.py PARENT_PID COMMAND...`: becomes COMMAND, and dies with the process that started it.

A program of its own, so that the parent needs no `preexec_fn` (which is unsafe in a process with threads). Standard
library only, and nothing of dsdoctor: it is started by its path.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it went before the request took effect
        sys.exit(1)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"cannot start {command[0]}: {error.strerror}")


if __name__ == "__main__":
    main()
