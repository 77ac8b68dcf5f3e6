"""Shared memory that ran out, seen in the communication check, in the job's run, or in its logs."""

from __future__ import annotations

import re
from collections.abc import Iterator

from dsdoctor.case import Case
from dsdoctor.comm.reading import read
from dsdoctor.diagnoses import context, processes
from dsdoctor.diagnoses.base import Diagnosis
from dsdoctor.diagnoses.forms import Form, TextDiagnosis
from dsdoctor.finding import Evidence, Finding, Fix
from dsdoctor.units import size

SHM_TEXT = (
    r"(?i)bus error|(?:/dev/shm|shared memory|\bshm\b|nccl|posix_fallocate failed)[^\n]*no space left"
    r"|no space left[^\n]*(?:/dev/shm|\bshm\b)"
)
SIGBUS = -7


class SharedMemoryExhausted(TextDiagnosis):
    """`/dev/shm` is too small: NCCL, data-loader workers and tensors shared between processes live there.

    What proves it: a process ends with SIGBUS (-7, `Bus error`), or an exception says that there is no space left in
    shared memory. Containers give 64 MiB by default.

    When it could be wrong: "No space left on device" from NCCL is shared memory, not the disk; the same words from
    elsewhere are the disk. SIGBUS also comes from a file on a network disk that was cut short while mapped.

    What to do: `docker run --shm-size=8g` or `--ipc=host`; in Kubernetes an `emptyDir` with `medium: Memory` mounted at
    `/dev/shm`. As a stop-gap `num_workers=0`, `NCCL_SHM_DISABLE=1`.
    """

    id = "memory/shm-exhausted"
    severity = "error"
    title = "shared memory is exhausted"
    forms = (
        Form(message=SHM_TEXT),
        Form(message=r"unable to (?:write to|open|mmap|resize) [^\n]*torch_[^\n]*No space left"),
    )
    cause = "there is no space left in shared memory (/dev/shm)"
    fixes = (
        Fix(
            text="give the container more shared memory: --shm-size=8g, --ipc=host, or an in-memory volume at /dev/shm"
        ),
    )

    def examine(self, case: Case) -> Iterator[Finding]:
        proof = (*_in_check(case), *_in_job(case), *_told_by_nccl(case))
        if not proof:
            yield from super().examine(case)
            return
        total = case.machine.shm_total if case.machine else None
        room = () if total is None else (Evidence(source="environment", text=f"/dev/shm has {size(total)}"),)
        yield self.finding(
            cause=self.cause,
            evidence=(*proof, *room),
            confidence=0.85,
            caveat="SIGBUS also comes from a mapped file that was cut short, on a network disk for instance.",
            fixes=self.fixes,
        )


def _in_check(case: Case) -> Iterator[Evidence]:
    """A rank of the communication check that ended with SIGBUS, or that was refused shared memory."""
    reading = read(case.comm) if case.comm is not None and case.comm.ranks else None
    for rank in reading.ranks if reading else ():
        if rank.exit_code == SIGBUS:
            yield Evidence(source="comm", rank=rank.rank, text=f"ended by signal 7 (bus error){rank.where}")
        elif rank.trouble is not None and re.search(SHM_TEXT, rank.trouble.text):
            yield Evidence(source="comm", rank=rank.rank, text=f"{rank.trouble.name}: {rank.trouble.text}")


def _in_job(case: Case) -> Iterator[Evidence]:
    return (ending.evidence for ending in processes.endings(case) if ending.code == SIGBUS)


def _told_by_nccl(case: Case) -> tuple[Evidence, ...]:
    """NCCL's own line about its segment of shared memory, and an exception of it that does not repeat the reason."""
    warned = list(case.logs.of_kind("nccl-shm")) if case.logs is not None else []
    failed = [context.evidence(one) for one in context.failures(case) if "NCCL error" in one.message]
    return (warned[0].evidence(), *failed[:2]) if warned and failed else ()


DIAGNOSES: tuple[Diagnosis, ...] = (SharedMemoryExhausted(),)
