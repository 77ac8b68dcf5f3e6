"""GPUs that are not free when the job begins."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dsdoctor.case import Case
from dsdoctor.comm.facts import CommFacts
from dsdoctor.diagnoses.base import Diagnosis
from dsdoctor.finding import Evidence, Finding, Fix
from dsdoctor.machine.facts import GpuProcess, MachineFacts
from dsdoctor.units import size

_NOTICED = 0.1
"""Share of a GPU's memory that may be in use without being worth a word: contexts, a display."""
_MATTERS = 0.5
_MOST = 6


@dataclass(frozen=True, kw_only=True)
class _Occupied:
    """A GPU and what is in use of it, in bytes."""

    where: str
    free: int
    total: int
    proof: tuple[Evidence, ...]

    @property
    def share(self) -> float:
        return 1 - self.free / self.total


class OccupiedGpu(Diagnosis):
    """A GPU of the job is in use already, so that the job gets less of its memory and has to share its time.

    What it is: a left-over process of an earlier run, another user's job, or a notebook that was never closed.

    What proves it: the driver's figure for free memory before any process of ours was started, with the processes that
    nvidia-smi lists; or what a rank of the communication check found free on its device, its own context included. More
    than a tenth in use is told, more than half is a warning.

    When it could be wrong: on a machine that is shared on purpose (MPS, a display) it is as it should be. In a
    container the processes of others are not seen, only their memory.

    What to do: `nvidia-smi` names the processes; end those of an earlier run (`kill PID`), or leave the device out with
    `CUDA_VISIBLE_DEVICES`.
    """

    id = "memory/gpu-occupied"
    severity = "warning"
    title = "a GPU is in use already"

    def examine(self, case: Case) -> Iterator[Finding]:
        found = _of_machine(case.machine) or _of_ranks(case.comm)
        found = sorted((one for one in found if one.share > _NOTICED), key=lambda one: -one.share)
        if not found:
            return
        worst = found[0]
        more = f", and {len(found) - 1} more are in use" if len(found) > 1 else ""
        yield self.finding(
            cause=f"{size(worst.total - worst.free)} of {size(worst.total)} of {worst.where} are in use{more}",
            evidence=tuple(proof for one in found for proof in one.proof)[:_MOST],
            severity="warning" if worst.share > _MATTERS else "info",
            confidence=0.9,
            fixes=(
                Fix(text="see who uses it (nvidia-smi); end what is left of an earlier run"),
                Fix(text="or leave that device out: CUDA_VISIBLE_DEVICES"),
            ),
        )


def _of_machine(machine: MachineFacts | None) -> Sequence[_Occupied]:
    """The GPUs that torch sees here, with what the driver says of them. Where torch was not asked, no job begins."""
    if machine is None or machine.accelerator is None:
        return ()
    return [
        _Occupied(
            where=f"GPU {device.index} ({device.name})",
            free=device.free_bytes,
            total=device.total_bytes,
            proof=(
                Evidence(source="environment", text=f"GPU {device.index}: {size(device.free_bytes)} free"),
                *(_process(one) for one in machine.gpu_processes if device.uuid and one.uuid == device.uuid),
            ),
        )
        for device in machine.devices
        if device.total_bytes and device.free_bytes is not None
    ]


def _process(process: GpuProcess) -> Evidence:
    holds = f" holds {size(process.used_bytes)}" if process.used_bytes is not None else ""
    return Evidence(source="nvidia-smi", text=f"process {process.pid} ({process.name}){holds}")


def _of_ranks(facts: CommFacts | None) -> Sequence[_Occupied]:
    """What each rank found on its device before it allocated anything."""
    if facts is None:
        return ()
    return [
        _Occupied(
            where=f"the GPU of rank {rank.rank} on {rank.host}",
            free=rank.gpu.free_bytes,
            total=rank.gpu.total_bytes,
            proof=(Evidence(source="comm", rank=rank.rank, text=f"{size(rank.gpu.free_bytes)} free on {rank.host}"),),
        )
        for rank in facts.ranks
        if rank.gpu is not None
    ]


DIAGNOSES: tuple[Diagnosis, ...] = (OccupiedGpu(),)
