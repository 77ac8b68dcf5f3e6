"""What `dsdoctor blame` costs beside its legs: the command on the healthy demo against the same legs run by hand.

    python tests/benchmarks/bench_blame.py [--rounds N]

By hand are: torchrun of the demo's script with DeepSpeed, and torchrun of the same script with `deepspeed.initialize`
played by the plain engine; 2 ranks and 20 steps each, as in the command. All three are run in turn; the medians of the
wall times are compared. At most 1.25 is wanted. Nothing else should run on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import Any

from dsdoctor.runs import extensions

DEMO = Path(import_module("dsdoctor.demo").__file__ or "").parent
CONFIG, SCRIPT = DEMO / "ds_config_bf16.json", DEMO / "train.py"
WANTED = 1.25
WITHOUT = """
import json, runpy, sys
import deepspeed
from dsdoctor.runs import plain

def initialize(config=None, **call):
    with open(config) as file:
        return plain.initialize(config=json.load(file), **call)

deepspeed.initialize = initialize
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def seconds(command: list[str], folder: str) -> float:
    """Wall time of a command, which must succeed."""
    began = time.monotonic()
    cache = str(extensions.prepared(extensions.cache_folder()))
    env = {**os.environ, "OMP_NUM_THREADS": "1", extensions.VARIABLE: cache}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return time.monotonic() - began


def commands(folder: str) -> dict[str, list[str]]:
    """What is timed, by name."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = [str(SCRIPT), "--deepspeed_config", str(CONFIG)]
    without = Path(folder) / "without.py"
    without.write_text(WITHOUT, encoding="utf-8")
    blame = [sys.executable, "-m", "dsdoctor", "blame", str(CONFIG), str(SCRIPT), "--nproc", "2", "--steps", "20"]
    return {
        "with DeepSpeed, by hand": [*torchrun, *script],
        "without it, by hand": [*torchrun, str(without), *script],
        "dsdoctor blame": [*blame, "--", "--deepspeed_config", str(CONFIG)],
    }


def measure(rounds: int) -> dict[str, list[float]]:
    """Wall times of each command, one a round, the commands in turn."""
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds + 1):
            for name, command in commands(folder).items():
                took = seconds(command, folder)
                if number > 0:  # the first round warms the disk's cache and the extensions
                    found.setdefault(name, []).append(took)
                    print(f"round {number}: {name} {took:.1f} s", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    times = measure(parser.parse_args().rounds)
    medians: dict[str, Any] = {name: round(statistics.median(values), 2) for name, values in times.items()}
    blame = medians["dsdoctor blame"]
    by_hand = sum(value for name, value in medians.items() if name != "dsdoctor blame")
    print(json.dumps(medians, indent=1))
    print(f"dsdoctor blame takes {blame / by_hand:.2f} times as long as its legs by hand (wanted: at most {WANTED})")


if __name__ == "__main__":
    main()
