"""Stands in for `dsdoctor.runs.child` in the tests of the parent: behaves as told, without torch.

`spec.extra["ranks"]` maps a rank to what it does: a word that names one of the functions below.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from dsdoctor.runs import rank_process
from dsdoctor.runs.facts import Failure, Step
from dsdoctor.runs.spec import RunSpec, trace_path
from dsdoctor.runs.trace import TraceWriter, read_trace


def wait_for_the_others() -> None:
    time.sleep(600)


def main() -> None:
    spec = RunSpec.read(next(word for word in sys.argv[1:] if not word.startswith("-")))
    folder, place = Path(spec.folder), rank_process.place(os.environ)
    todo = spec.extra["ranks"].get(str(place.rank), "stop")
    if todo == "hang-before-start":
        wait_for_the_others()
    rank_process.die_with_parent()
    rank_process.redirect_output(folder, place.rank)
    rank_process.show_stacks_on_signal(folder, place.rank)
    trace = TraceWriter(trace_path(folder, place.rank))
    trace.start(rank=place.rank, local_rank=place.local_rank, world_size=place.world_size, host="here", versions={})
    trace.enter("forward", 0, 0)
    trace.step(Step(index=0, losses=(1.5,)))
    globals()[f"do_{todo.replace('-', '_')}"](trace, folder)


def do_stop(trace: TraceWriter, folder: Path) -> None:
    trace.stop("steps")


def do_print_environment(trace: TraceWriter, folder: Path) -> None:
    for name in ("WANDB_MODE", "DS_ACCELERATOR", "DSDOCTOR_RUN"):
        print(f"{name}={os.environ.get(name)}")
    trace.stop("steps")


def do_wait_for_a_build(trace: TraceWriter, folder: Path) -> None:
    while Path(os.environ["TORCH_EXTENSIONS_DIR"], "cpu_adam", "lock").exists():
        time.sleep(0.1)
    trace.finish(0)


def do_finish(trace: TraceWriter, folder: Path) -> None:
    trace.finish(0)


def do_stop_then_abort(trace: TraceWriter, folder: Path) -> None:
    trace.stop("steps")
    while not read_trace(folder, 1).stopped:  # the launcher ends the others as soon as one aborts
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGABRT)


def do_raise(trace: TraceWriter, folder: Path) -> None:
    trace.failure(Failure(rank=None, type="KeyError", message="'weight'"))
    sys.exit(1)


def do_exit_3(trace: TraceWriter, folder: Path) -> None:
    trace.finish(3)
    print("usage: train.py\n\ntrain.py: error: no such option: --lr\n", file=sys.stderr)
    sys.exit(3)


def do_exit_for_its_loss(trace: TraceWriter, folder: Path) -> None:
    trace.finish(1)
    print("Loss is nan, stopping training\n{'loss': nan}")
    print("[2026-11-30 08:10:27,328] [INFO] [stage_1_and_2.py:504:__init__] Flattening param group 0", flush=True)
    print("ERROR:root:giving up\ntrain.py:9: UserWarning: this is old\n  warnings.warn('this is old')", file=sys.stderr)
    print("[rank0]:[W1130 08:10:27.955037501 Utils.hpp:137] Warning: it was not called", file=sys.stderr)
    sys.exit(1)


def do_exit_in_silence(trace: TraceWriter, folder: Path) -> None:
    os._exit(4)


def do_sigkill(trace: TraceWriter, folder: Path) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def do_sigkill_group(trace: TraceWriter, folder: Path) -> None:
    os.killpg(os.getpgrp(), signal.SIGKILL)


def do_segfault(trace: TraceWriter, folder: Path) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def do_hang(trace: TraceWriter, folder: Path) -> None:
    wait_for_the_others()


def do_hang_deaf(trace: TraceWriter, folder: Path) -> None:
    """Ignores every polite request, and has a grandchild in a session of its own that does the same."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    subprocess.Popen([sys.executable, "-c", deaf], start_new_session=True)
    wait_for_the_others()


def do_orphan(trace: TraceWriter, folder: Path) -> None:
    """Leaves a daemon behind, in the way daemons are made: the process between the two ends at once."""
    daemon = "import subprocess, sys; subprocess.Popen(['sleep', '600'], start_new_session=True)"
    subprocess.run([sys.executable, "-c", daemon], check=True)
    trace.finish(0)


def do_orphan_and_hang(trace: TraceWriter, folder: Path) -> None:
    do_orphan(trace, folder)
    wait_for_the_others()


def do_sigstop(trace: TraceWriter, folder: Path) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def do_shared_memory(trace: TraceWriter, folder: Path) -> None:
    """Makes a segment, and is killed before it could remove it."""
    segment = make_segment(folder)
    time.sleep(3)
    os.kill(os.getpid(), signal.SIGKILL)
    del segment


def do_shared_memory_and_hang(trace: TraceWriter, folder: Path) -> None:
    segment = make_segment(folder)
    trace.enter("backward", 1, 0)
    wait_for_the_others()
    del segment


def make_segment(folder: Path) -> object:
    from multiprocessing import resource_tracker
    from multiprocessing.shared_memory import SharedMemory

    segment = SharedMemory(create=True, size=4096)
    resource_tracker.unregister(f"/{segment.name}", "shared_memory")
    (folder / "segment.txt").write_text(segment.name)
    return segment


if __name__ == "__main__":
    main()
