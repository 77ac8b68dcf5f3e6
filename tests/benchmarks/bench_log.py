"""How fast `dsdoctor log` reads a long log, against grep for the same literals on the same file in the same run.

    python tests/benchmarks/bench_log.py [--size MIB] [--rounds N] [--folder DIR]

The log is one of the Trainer: for every step a progress bar and a dict with loss, gradient norm and learning rate,
told by four ranks in turn, and some skipped steps. Both commands are run in turn; the medians are compared. The ratio
of wall times is what counts on an idle machine, that of CPU times tells more on a busy one. The speed at which logs of
other shapes are read is printed too.
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


def words(step: int, numbers: random.Random) -> str:
    """Text that hardly repeats."""
    return " ".join("".join(numbers.choices("aeinorst", k=numbers.randint(2, 9))) for _ in range(12)) + "\n"


def megatron(step: int, numbers: random.Random) -> str:
    return (
        f" iteration {step:8d}/ 500000 | consumed samples: {step * 8:12d} | elapsed time per iteration (ms): "
        f"{1000 * numbers.random():.1f} | learning rate: {numbers.random():.3E} | lm loss: {numbers.random():.6E} | "
        f"loss scale: 131072.0 | grad norm: {numbers.random():.3f} | number of skipped iterations:   0 |\n"
    )


def nccl(step: int, numbers: random.Random) -> str:
    process = f"node{step % 4:02d}:{1000 + step % 8}:2 [{step % 8}]"
    return f"{process} NCCL INFO Channel {step % 32:02d}/1 : 0[0] -> 1[1] via P2P/CUMEM\n"


def bar(step: int, numbers: random.Random) -> str:
    return f"\r 10%|{'█':10}| {step}/9000000 [00:04<41:12:01,  2.{step % 97:02d}it/s, loss={4 * numbers.random():.3f}]"


SHAPES = (words, megatron, nccl, bar)


def others(folder: Path, size: int) -> None:
    """Print how fast logs of other shapes are read, each of about `size` bytes."""
    for shape in SHAPES:
        numbers = random.Random(0)
        log = folder / f"{shape.__name__}.log"
        with log.open("w", encoding="utf-8") as stream:
            stream.writelines(shape(step, numbers) for step in range(size // len(shape(1, random.Random(0)).encode())))
        run = measure([sys.executable, "-m", "dsdoctor", "log", "--json", str(log)])
        read = log.stat().st_size / 2**20
        print(f"{shape.__name__:14} {read / run.cpu:7.0f} MiB/s of CPU time, start included, {run.memory:.0f} MB")


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
        others(Path(folder), (options.size << 20) // 16)


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
