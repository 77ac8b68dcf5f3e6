"""How fast `dsdoctor log` reads a long log, against grep for the same literals on the same file in the same run.

    python tests/benchmarks/bench_log.py [--size MIB] [--rounds N] [--folder DIR]

The log is one of the Trainer: for every step a progress bar and a dict with loss, gradient norm and learning rate,
told by four ranks in turn, and some skipped steps. Both commands are run in turn; the medians are compared. The ratio
of wall times is what counts on an idle machine, that of CPU times tells more on a busy one.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dsdoctor.logs.shapes import LITERALS

RANKS = 4
BYTES_OF_A_STEP = 248
STAMP = "[2026-05-20 10:59:31,{:03d}] [INFO] [loss_scaler.py:190:update_scale] [deepspeed] OVERFLOW! Rank 0 "
OVERFLOW = STAMP + "Skipping step. Attempted loss scale: {}, reducing to {}\n"


@dataclass(frozen=True)
class Measured:
    """One run of a command: seconds on the clock, seconds of CPU, most memory in MB, and what it printed."""

    wall: float
    cpu: float
    memory: float
    output: str


def steps(total: int) -> Iterator[str]:
    """What is printed in each of `total` steps; the same with every call."""
    numbers = random.Random(0)
    scale = 2**16
    for step in range(1, total + 1):
        part = step / total
        clock = f"{step // 3600:02d}:{step // 60 % 60:02d}:{step % 60:02d}"
        bar = f"{int(100 * part):3d}%|{'█' * int(10 * part):10}|"
        yield f"\r{bar} {step}/{total} [{clock}<41:12:01,  2.{step % 97:02d}it/s]"
        if numbers.random() < 0.001:
            yield OVERFLOW.format(step % 1000, scale, scale // 2)
            scale = scale // 2 if scale > 2**8 else 2**16
        loss, norm = round(1.5 + 2 * numbers.random() * (1.1 - part), 4), 3 * numbers.random()
        values = {"loss": loss, "grad_norm": norm, "learning_rate": 5e-5 * (1 - part), "epoch": round(3 * part, 2)}
        yield f"\r{'':60}\r[rank{step % RANKS}]: {values}\n"


def write(path: Path, size: int) -> int:
    """Write a log of about `size` bytes; how many steps are in it."""
    total = size // BYTES_OF_A_STEP
    with path.open("w", encoding="utf-8") as stream:
        stream.writelines(steps(total))
    return total


def measure(command: list[str]) -> Measured:
    """Run a command on one core, where the system lets choose it."""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as output:
        start = time.perf_counter()
        process = subprocess.Popen(command, stdout=output, preexec_fn=_on_one_core)
        _, _, used = os.wait4(process.pid, 0)
        wall = time.perf_counter() - start
        output.seek(0)
        return Measured(wall, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024, output.read())


def _on_one_core() -> None:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def check(document: str, total: int) -> None:
    """Fail unless all steps were understood."""
    found = json.loads(document)
    assert found["understood"]["steps_seen"] == total, found["understood"]
    assert found["understood"]["ranks"] == list(range(RANKS))
    for name in ("loss", "grad_norm", "lr"):
        assert 1000 < len(found["series"][name]) <= 5000, name
        assert found["series"][name][-1][0] == total, name


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", type=int, default=1024, metavar="MIB", help="size of the log (default 1024)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    parser.add_argument("--folder", default=None, metavar="DIR", help="where the log is written for the time")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        log, literals = Path(folder, "train.log"), Path(folder, "literals")
        total = write(log, options.size << 20)
        literals.write_bytes(b"\n".join(LITERALS) + b"\n")
        compare(log, literals, total, options.rounds)


def compare(log: Path, literals: Path, total: int, rounds: int) -> None:
    """Run both commands in turn, and print the medians and their ratio."""
    ours: list[Measured] = []
    greps: list[Measured] = []
    for _ in range(rounds):
        greps.append(measure(["grep", "-c", "-F", "-f", str(literals), str(log)]))
        ours.append(measure([sys.executable, "-m", "dsdoctor", "log", "--json", str(log)]))
        check(ours[-1].output, total)
    size = log.stat().st_size / 2**20
    print(f"{size:.0f} MiB, {total} steps, {len(LITERALS)} literals, medians of {rounds} rounds")
    wall = [statistics.median(run.wall for run in runs) for runs in (greps, ours)]
    cpu = [statistics.median(run.cpu for run in runs) for runs in (greps, ours)]
    for name, seconds, work in zip(("grep", "dsdoctor log"), wall, cpu, strict=True):
        print(f"{name:14} {seconds:7.2f} s wall  {work:7.2f} s cpu  {size / seconds:7.0f} MiB/s")
    print(f"ratio: {wall[1] / wall[0]:.1f} by wall time, {cpu[1] / cpu[0]:.1f} by CPU time")
    print(f"most memory of dsdoctor log: {max(run.memory for run in ours):.0f} MB")


if __name__ == "__main__":
    main()
