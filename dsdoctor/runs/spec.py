"""The order that the parent gives to the rank processes: one JSON file, named on their command line.

The parent writes it once per run (`RunSpec.write`), every rank reads it (`RunSpec.read`) before the user's script
starts. It holds everything that a rank has to know; nothing travels in environment variables of our own except the
marker by which the parent finds left-over processes.
"""

from __future__ import annotations

import json
import signal
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

RUN_MARKER = "DSDOCTOR_RUN"
"""Environment variable that every process of a run inherits; its value is the run's folder."""

STACK_SIGNAL: int = signal.SIGRTMAX - 3
"""Signal on which a rank writes the stacks of its threads to `stack_path`; a real-time one that no library uses."""


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """One run of the user's script.

    `config` is the ds_config put in place of whatever the script passes. `steps` are optimizer steps attempted.
    `probe` ends the run as soon as the model is handed to DeepSpeed. `detector` attaches the numerics detector to the
    engine. `patient_steps` is how far the run may go on past `steps` while a loss scale still falls. `shrink` builds
    Hugging Face models with fewer layers; `checkpoint` is a folder of DeepSpeed's that the engine goes on from.
    """

    script: str
    args: tuple[str, ...] = ()
    as_module: bool = False
    cwd: str
    folder: str
    config: dict[str, Any]
    engine: Literal["deepspeed", "plain"] = "deepspeed"
    precision: Literal["as-configured", "fp32"] = "as-configured"
    probe: bool = False
    detector: bool = False
    steps: int = 20
    patient_steps: int = 40
    shrink: bool = False
    checkpoint: str | None = None
    seed: int | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    extra: dict[str, Any] = field(default_factory=dict)

    def write(self) -> Path:
        """Write the order as `spec.json` into the run's folder and return its path."""
        path = Path(self.folder) / "spec.json"
        path.write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")
        return path

    @classmethod
    def read(cls, path: str | Path) -> RunSpec:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
        values["args"] = tuple(values["args"])
        return cls(**values)


def trace_path(folder: str | Path, rank: int) -> Path:
    return Path(folder) / f"trace-rank{rank}.jsonl"


def stack_path(folder: str | Path, rank: int) -> Path:
    """Where faulthandler of that rank writes the stacks of its threads when the parent asks for them."""
    return Path(folder) / f"stack-rank{rank}.txt"


def collectives_path(folder: str | Path, rank: int) -> Path:
    """Where that rank writes its last collectives when the parent asks for them."""
    return Path(folder) / f"collectives-rank{rank}.json"


def result_path(folder: str | Path, name: str, rank: int) -> Path:
    """Where that rank leaves a result of the given name for the parent."""
    return Path(folder) / f"{name}-rank{rank}.json"


def saved_path(folder: str | Path) -> Path:
    """Where checkpoints and other files that the script saves are redirected to."""
    return Path(folder) / "saved"
