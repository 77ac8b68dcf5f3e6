"""What the user asked for: one job to be examined, from the command line."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class NumericsOrder:
    """What `dsdoctor nan` asks for. The detector then runs whether or not a run failed.

    `trace_batches` (from 0) are printed in full, `stop_after_batch` is the last one to run. `bundle` is the folder of a
    batch that is to run again in place of the script's own, `selftest` plants faults in the model. `record` keeps the
    numbers of every tensor, to compare runs.
    """

    trace_batches: tuple[int, ...] = ()
    stop_after_batch: int | None = None
    bundle: str | None = None
    selftest: bool = False
    record: bool = False

    def extra(self) -> dict[str, Any]:
        """What of it the rank processes are told."""
        given = {**vars(self), "trace_batches": list(self.trace_batches)}
        return {name: value for name, value in given.items() if value not in (None, False, [])}


@dataclass(frozen=True, kw_only=True)
class Job:
    """The script, its ds_config, and the limits. Times are seconds; `budget` is None for no limit.

    `nproc` is None for the default: all GPUs, else 2. `script` is a path, or a module name with `as_module`.
    """

    config: Path
    script: str
    args: tuple[str, ...] = ()
    as_module: bool = False
    nproc: int | None = None
    launcher: Literal["torchrun", "deepspeed", "slurm"] = "torchrun"
    hostfile: str | None = None
    steps: int = 20
    timeout: float = 600.0
    stall: float = 60.0
    budget: float | None = None
    seed: int | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    stages: tuple[str, ...] = ()
    resume: bool = False
    shrink: bool = False
    checkpoint: str | None = None
    """`shrink`: Hugging Face models with fewer layers. `checkpoint`: DeepSpeed's folder that every leg goes on from."""
    bisect: Literal["suspects", "automatic", "asked"] = "automatic"
    """How far the search for guilty keys goes, see `blame.plan.Depth`."""
    numerics: NumericsOrder | None = None
    ask_libraries_late: bool = False
    """Ask torch and DeepSpeed about the machine only where a run failed, as no verdict needs it before."""
    folder: Path
    cwd: str = field(default_factory=os.getcwd)
    began: float = field(default_factory=time.monotonic)

    def remaining(self) -> float:
        """Seconds of the budget that are left; infinite without one."""
        return float("inf") if self.budget is None else self.budget - (time.monotonic() - self.began)
