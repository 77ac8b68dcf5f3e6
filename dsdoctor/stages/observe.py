"""One observed run of the user's script on behalf of a stage: how it is launched, and which limits hold."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from dsdoctor.runs.facts import Leg, Run
from dsdoctor.runs.launcher import LaunchPlan, chosen_port
from dsdoctor.runs.spec import RunSpec
from dsdoctor.runs.store import keep, key_of, recall
from dsdoctor.runs.supervise import Limits, supervise
from dsdoctor.runs.written import changed, listing
from dsdoctor.triage import Examination


def nproc(examination: Examination) -> int:
    """Ranks to start: what the user says, else all GPUs, else 2."""
    return examination.job.nproc or len(examination.machine.devices) or 2


def host_device(examination: Examination) -> Literal["cpu", "cuda"]:
    """Where tensors will live: what the user says, else a GPU if torch sees one."""
    if examination.job.device != "auto":
        return examination.job.device
    return "cuda" if examination.machine.devices else "cpu"


def launch_plan(examination: Examination) -> LaunchPlan:
    """How the ranks are started. A MASTER_ADDR or MASTER_PORT of the user's environment is kept."""
    job = examination.job
    return LaunchPlan(
        nproc=nproc(examination),
        launcher=job.launcher,
        hostfile=job.hostfile,
        master_addr=os.environ.get("MASTER_ADDR") or "127.0.0.1",
        master_port=chosen_port(),
        device=job.device,
    )


def observe(
    examination: Examination,
    leg: Leg,
    *,
    engine: Literal["deepspeed", "plain"],
    name: str | None = None,
    config: Mapping[str, Any] | None = None,
    precision: Literal["as-configured", "fp32"] = "as-configured",
    probe: bool = False,
    detector: bool = False,
    steps: int | None = None,
    timeout: float | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Run:
    """Run the script once.

    `extra` are orders to the detector. `config` replaces the given one (for a proof); `name` is the run's folder, else
    the leg. `steps` and `timeout` (seconds) are narrower limits than the job's.
    """
    job = examination.job
    given = examination.case.config.data if examination.case.config is not None else {}
    spec = RunSpec(
        script=job.script,
        args=job.args,
        as_module=job.as_module,
        cwd=job.cwd,
        folder=str(job.folder / (name or leg)),
        config=dict(given if config is None else config),
        engine=engine,
        precision=precision,
        probe=probe,
        detector=detector,
        steps=job.steps if steps is None else steps,
        shrink=job.shrink,
        checkpoint=job.checkpoint,
        seed=job.seed,
        device=job.device,
        extra=dict(extra or {}),
    )
    plan = launch_plan(examination)
    key = key_of(spec, plan, examination.machine.versions)
    known = recall(job.folder.parent, name or leg, key) if job.resume else None
    if known is not None:
        examination.tell(f"{name or leg}: reusing the run of {known.folder}")
        return known
    run = _observed(examination, spec, plan, leg, job.timeout if timeout is None else min(timeout, job.timeout))
    keep(run, key)
    return run


def _observed(examination: Examination, spec: RunSpec, plan: LaunchPlan, leg: Leg, timeout: float) -> Run:
    """Run it, and see what else it wrote in the working directory."""
    job = examination.job
    before = listing(job.cwd, leave_out=job.folder.parent)
    limits = Limits(timeout=min(timeout, job.remaining()), stall=job.stall)
    run = supervise(spec, plan, limits, leg, progress=lambda text: examination.progress(f"{leg}: {text}"))
    run = replace(run, written=changed(before, listing(job.cwd, leave_out=job.folder.parent)))
    if not Path(run.folder).is_dir():
        why = f"the script deleted {run.folder} with all that was seen of it; choose another place with --out"
        return replace(run, outcome="interrupted", ranks=(), why=why)
    if run.outcome == "timeout" and job.remaining() <= 0:
        examination.out_of_budget = True
        return replace(run, outcome="interrupted", why="the budget was used up in this run")
    return run
