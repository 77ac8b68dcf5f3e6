"""Builds and memory that go wrong under real DeepSpeed: `software.py HOW`, run by `produce_software.py`."""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from job import Net, config, train

EXTENSIONS = Path("extensions").absolute()
NO_HEADERS = """#!/bin/sh
for word in "$@"; do
    shift
    case "$word" in */include/python3*) set -- "$@" /no/such/folder ;; *) set -- "$@" "$word" ;; esac
done
exec g++ "$@"
"""
"""A compiler that does not find Python's headers, as where the development package is missing."""


def host_limit() -> None:
    """Less address space than the model needs, as under a batch system that sets `ulimit -v`."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), resource.RLIM_INFINITY))
    train(config(), 3, model=Net(hidden=1 << 26))


def cpu_adam() -> None:
    os.environ["TORCH_EXTENSIONS_DIR"] = str(EXTENSIONS)
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    DeepSpeedCPUAdam(Net().parameters())


def no_headers() -> None:
    Path("g++-bare").write_text(NO_HEADERS)
    Path("g++-bare").chmod(0o755)
    os.environ["CXX"] = str(Path("g++-bare").absolute())
    cpu_adam()


def no_ninja() -> None:
    os.environ["PATH"] = "/usr/sbin"
    cpu_adam()


def stale_lock() -> None:
    """A build was killed here; the next process waits for its lock, until Ctrl-C."""
    folder = EXTENSIONS / "cpu_adam"
    folder.mkdir(parents=True)
    (folder / "lock").touch()
    threading.Thread(target=_interrupt_the_waiting, args=(threading.get_ident(),), daemon=True).start()
    cpu_adam()


def _interrupt_the_waiting(thread: int) -> None:
    while "file_baton.py" not in "".join(traceback.format_stack(sys._current_frames()[thread])):
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGINT)


def no_toolkit() -> None:
    """A CUDA source to be compiled on a machine where torch finds no toolkit."""
    os.environ["TORCH_CUDA_ARCH_LIST"] = "8.0"
    from torch.utils import cpp_extension

    cpp_extension.CUDA_HOME = None
    Path("kernel.cu").write_text("int main() { return 0; }\n")
    cpp_extension.load("kernel", ["kernel.cu"], build_directory=".", with_cuda=True)


def no_nvme_path() -> None:
    zero = {"stage": 3, "offload_param": {"device": "nvme"}}
    train(config(zero_optimization=zero), 3)


def main() -> None:
    how = next(word for word in sys.argv[1:] if not word.startswith("--"))
    globals()[how.replace("-", "_")]()


if __name__ == "__main__":
    main()
