"""The knowledge: every diagnosis there is, in one tuple, and the function that runs them over a case."""

from __future__ import annotations

import traceback
from dataclasses import dataclass

from dsdoctor.case import Case
from dsdoctor.diagnoses import (
    autograd,
    bisected,
    build,
    capacity,
    checkpoint,
    comm,
    config,
    disagreement,
    environment,
    first_collective,
    generation,
    hang,
    hardware,
    headroom,
    internal,
    known_defects,
    launch,
    loss_scale,
    loss_scale_hidden,
    loss_scale_trouble,
    memory,
    memory_host,
    memory_request,
    network,
    numerics,
    numerics_precision,
    numerics_unseen,
    occupied_gpu,
    raised,
    rendezvous,
    script,
    script_calls,
    shared_memory,
    signals,
    slow_links,
    speed,
    stopped,
    storage,
    values,
    version,
    watchdog,
    zero3,
    zero3_hangs,
)
from dsdoctor.diagnoses.base import Diagnosis
from dsdoctor.diagnoses.rank import ranked
from dsdoctor.finding import Finding

ALL: tuple[Diagnosis, ...] = (
    *config.DIAGNOSES,
    *values.DIAGNOSES,
    *bisected.DIAGNOSES,
    *known_defects.DIAGNOSES,
    *environment.DIAGNOSES,
    *rendezvous.DIAGNOSES,
    *comm.DIAGNOSES,
    *disagreement.DIAGNOSES,
    *first_collective.DIAGNOSES,
    *generation.DIAGNOSES,
    *watchdog.DIAGNOSES,
    *network.DIAGNOSES,
    *capacity.DIAGNOSES,
    *launch.DIAGNOSES,
    *stopped.DIAGNOSES,
    *raised.DIAGNOSES,
    *signals.DIAGNOSES,
    *memory_request.DIAGNOSES,
    *memory.DIAGNOSES,
    *memory_host.DIAGNOSES,
    *shared_memory.DIAGNOSES,
    *hang.DIAGNOSES,
    *numerics_precision.DIAGNOSES,
    *numerics.DIAGNOSES,
    *headroom.DIAGNOSES,
    *numerics_unseen.DIAGNOSES,
    *loss_scale_trouble.DIAGNOSES,
    *loss_scale.DIAGNOSES,
    *loss_scale_hidden.DIAGNOSES,
    *zero3.DIAGNOSES,
    *zero3_hangs.DIAGNOSES,
    *autograd.DIAGNOSES,
    *internal.DIAGNOSES,
    *script.DIAGNOSES,
    *script_calls.DIAGNOSES,
    *build.DIAGNOSES,
    *version.DIAGNOSES,
    *checkpoint.DIAGNOSES,
    *storage.DIAGNOSES,
    *hardware.DIAGNOSES,
    *occupied_gpu.DIAGNOSES,
    *speed.DIAGNOSES,
    *slow_links.DIAGNOSES,
)
"""Each family module exports its own tuple `DIAGNOSES`; they are joined here, by hand."""


@dataclass(frozen=True, kw_only=True)
class Diagnosed:
    """The findings in order, and the tracebacks of rules that crashed (a defect of ours, shown to the user)."""

    findings: tuple[Finding, ...]
    broken: tuple[str, ...] = ()


def diagnose(case: Case, *, strict: bool = False) -> Diagnosed:
    """Run every rule. A rule that crashes is a recorded result; with `strict` (in tests) it raises."""
    findings: list[Finding] = []
    broken: list[str] = []
    for diagnosis in ALL:
        try:
            findings.extend(diagnosis.examine(case))
        except Exception:
            if strict:
                raise
            broken.append(f"{diagnosis.id}: {traceback.format_exc()}")
    return Diagnosed(findings=ranked(findings), broken=tuple(broken))


def by_id() -> dict[str, Diagnosis]:
    """The catalogue, sorted by id."""
    return {diagnosis.id: diagnosis for diagnosis in sorted(ALL, key=lambda d: d.id)}
