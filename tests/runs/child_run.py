"""Run a script in real rank processes, as a launcher would start them, and read what they left."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from typing import Any

from dsdoctor.runs.extensions import VARIABLE, cache_folder
from dsdoctor.runs.spec import RunSpec
from dsdoctor.runs.trace import RankTrace, read_trace

REPOSITORY = Path(__file__).resolve().parents[2]
SECONDS = 240


@dataclass(frozen=True, kw_only=True)
class ChildRun:
    """Exit codes and traces by rank; `work` is the script's working directory, `folder` the run's."""

    work: Path
    folder: Path
    codes: tuple[int, ...]
    traces: tuple[RankTrace, ...]

    @property
    def trace(self) -> RankTrace:
        return self.traces[0]

    def stdout(self, rank: int = 0) -> str:
        return (self.folder / f"stdout-rank{rank}.txt").read_text()

    def stderr(self, rank: int = 0) -> str:
        return (self.folder / f"stderr-rank{rank}.txt").read_text()


def write_script(work: Path, text: str, name: str = "train.py") -> Path:
    """Write an indented text as a script into `work`, with the folders that it needs."""
    path = work / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(dedent(text))
    return path


def rank_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """What torchrun or the deepspeed launcher would set, on a machine treated as one without GPU."""
    return {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": str(REPOSITORY),
        VARIABLE: os.environ.get(VARIABLE) or str(cache_folder("cpu")),
    }


def child_command(
    work: Path,
    *,
    rank: int = 0,
    world_size: int = 1,
    port: int = 0,
    launcher_arguments: Sequence[str] = (),
    **order: Any,
) -> tuple[list[str], dict[str, str]]:
    """Command and environment of one rank; `order` are the fields of the RunSpec that differ from the usual ones."""
    folder = work.parent / f"{work.name}-run"
    folder.mkdir(exist_ok=True)
    spec = RunSpec(**{"script": "train.py", "cwd": str(work), "folder": str(folder), "config": {}, **order})
    command = [sys.executable, "-m", "dsdoctor.runs.child", *launcher_arguments, str(spec.write())]
    return command, rank_environment(rank, world_size, port)


def run_child(work: Path, *, world_size: int = 1, launcher_arguments: Sequence[str] = (), **order: Any) -> ChildRun:
    """Run the script of `work` on `world_size` ranks to the end, from an empty folder."""
    folder = work.parent / f"{work.name}-run"
    shutil.rmtree(folder, ignore_errors=True)
    port = free_port()
    ranks = []
    for rank in range(world_size):
        command, environment = child_command(
            work, rank=rank, world_size=world_size, port=port, launcher_arguments=launcher_arguments, **order
        )
        ranks.append(subprocess.Popen(command, env=environment, cwd=work))
    try:
        codes = tuple(process.wait(timeout=SECONDS) for process in ranks)
    finally:
        for process in ranks:
            process.kill()
        for left in Path("/dev/shm").glob(f"deepspeed_*_{port}_*"):  # of DeepSpeed's CPU op; a run's parent removes it
            left.unlink(missing_ok=True)
    traces = tuple(read_trace(folder, rank) for rank in range(world_size))
    return ChildRun(work=work, folder=folder, codes=codes, traces=traces)


def run_bare(work: Path, arguments: Sequence[str] = ()) -> str:
    """Run the script of `work` without dsdoctor, on one rank, and return what it printed."""
    done = subprocess.run(
        [sys.executable, "train.py", *arguments],
        env=rank_environment(0, 1, free_port()),
        cwd=work,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=True,
    )
    return done.stdout


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port: int = server.getsockname()[1]
        return port
