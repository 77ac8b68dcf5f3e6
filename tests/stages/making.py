"""Made-up runs for the stages: what `supervise` would have given back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dsdoctor.dsconfig.facts import ConfigFacts
from dsdoctor.job import Job
from dsdoctor.runs.facts import EngineFacts, Failure, RankRun, Run, Step
from dsdoctor.triage import Examination

Result = Callable[[Any], Run]
"""From the order of a run to what came of it."""


def run(spec: Any, losses: Sequence[float] = (1.0,) * 8, **values: Any) -> Run:
    """A run of two ranks as `spec` orders, with these losses; it ends where `spec.steps` are done."""
    steps = tuple(Step(index=i, losses=(loss,)) for i, loss in enumerate(losses[: spec.steps]))
    facts = EngineFacts(framework="deepspeed", config=spec.config, precision="bf16", zero_stage=2, optimizer=None)
    failure = values.pop("failure", None)
    ranks = tuple(RankRun(rank=r, steps=steps, called_engine=True, failure=failure) for r in range(2))
    return Run(
        leg="proof",
        engine=spec.engine,
        precision=spec.precision,
        outcome="raised" if failure is not None else "stopped",
        ranks=ranks,
        seconds=values.pop("seconds", 2.0),
        folder=spec.folder,
        world_size=2,
        facts=facts,
        **values,
    )


def failure(message: str = "boom", kind: str = "RuntimeError", step: int = 2) -> Failure:
    return Failure(rank=0, type=kind, message=message, step=step)


def examination(tmp_path: Path, config: dict[str, Any], **job: Any) -> Examination:
    """One whose config is read already."""
    asked = Job(
        config=tmp_path / "ds.json", script="train.py", folder=tmp_path / "r" / "0001", cwd=str(tmp_path), **job
    )
    made = Examination(job=asked)
    made.learn(config=ConfigFacts(path="ds.json", data=config, release="0.19.8"))
    return made
