"""What the machine's own facts say of the compiled ops that the config uses, before anything is built.

The diagnoses of failed builds (`diagnoses.build`) ask here too, so that a machine that cannot build an op has the same
diagnosis before a run as after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from dsdoctor.case import Case
from dsdoctor.diagnoses.base import Diagnosis
from dsdoctor.finding import Evidence, Finding, Fix
from dsdoctor.machine.facts import OpBuild

Obstacle = Literal["no-such-op", "toolkit-mismatch", "no-toolkit", "tool"]

CAVEAT = "A build that is finished in torch's cache is used without the tools; a script may bring its own optimizer."


def obstacle(op: OpBuild) -> Obstacle | None:
    """What keeps the op from being built, None where nothing does (or it is there already)."""
    if op.installed or (op.compatible is not False and not op.missing):
        return None
    if not op.implemented:
        return "no-such-op"
    if "CUDAMismatch" in op.problem:
        return "toolkit-mismatch"
    return "no-toolkit" if "CUDA_HOME" in op.missing or "MissingCUDA" in op.problem else "tool"


def findings(diagnosis: Diagnosis, case: Case, kind: Obstacle) -> Iterator[Finding]:
    """One finding of `diagnosis` for each op that the config uses and that this keeps from being built.

    A job that made a step has loaded its ops, whatever the machine seems to lack.
    """
    if any(run.steps_made for run in case.runs if run.leg == "with-deepspeed"):
        return
    for op in case.machine.ops if case.machine else ():
        if obstacle(op) == kind:
            why = _why(op, case.machine.accelerator if case.machine else None)
            yield diagnosis.finding(
                cause=f"the op {op.name}, which {op.needed_by} needs, cannot be built here: {why}",
                evidence=(Evidence(source="environment", text=op.problem or why),),
                confidence=0.85,
                caveat=CAVEAT,
                fixes=(_fix(op),),
                keys=(op.needed_by,) if "." in op.needed_by else (),
            )


def _why(op: OpBuild, accelerator: str | None) -> str:
    if not op.implemented:
        return f"the {accelerator} accelerator has no such op"
    if op.missing:
        return " and ".join(f"{tool} is not found" for tool in op.missing)
    return (op.problem.splitlines() or ["its builder says so"])[0].replace("[WARNING]", "").strip()


def _fix(op: OpBuild) -> Fix:
    if op.name == "async_io":
        return Fix(text="install libaio's development package (libaio-dev or libaio-devel)")
    if "ninja" in op.missing:
        return Fix(text="install ninja and put it on PATH (a Python called by its path does not put its tools there)")
    if "adam" in op.name.lower() and op.needed_by == "optimizer.type":
        return Fix(text="install what is missing, or use PyTorch's own Adam", patch=_TORCH_ADAM)
    return Fix(text=f"install {', '.join(op.missing) or 'what the builder names'}, or choose a setting without the op")


_TORCH_ADAM = {"optimizer": {"params": {"torch_adam": True}}}
