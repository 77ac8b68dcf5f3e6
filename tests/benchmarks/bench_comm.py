"""How long a healthy check of two ranks takes on the CPU, beside two processes that only import torch.

Run as `python tests/benchmarks/bench_comm.py [ROUNDS]`: seconds of both (medians of rounds that take turns), and the
ratio. Both include the start of Python; the check also includes torchrun, the two ranks and every collective.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

CHECK = [sys.executable, "-m", "dsdoctor", "comm", "--nproc", "2", "--device", "cpu", "--json"]
IMPORT = [sys.executable, "-c", "import torch"]


def check() -> float:
    start = time.perf_counter()
    subprocess.run(CHECK, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def imports() -> float:
    start = time.perf_counter()
    both = [subprocess.Popen(IMPORT) for _ in range(2)]
    assert [process.wait() for process in both] == [0, 0]
    return time.perf_counter() - start


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    pairs = [(check(), imports()) for _ in range(rounds)]
    checked, imported = (statistics.median(column) for column in zip(*pairs, strict=True))
    print(f"healthy check of 2 ranks: {checked:.1f} s; two imports of torch: {imported:.1f} s")
    print(f"ratio: {checked / imported:.1f}")


if __name__ == "__main__":
    main()
