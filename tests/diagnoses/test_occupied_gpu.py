"""GPUs that others use, as the driver or a rank of the check found them."""

from dataclasses import replace

import pytest

from dsdoctor.case import Case
from dsdoctor.comm.facts import CommFacts, CommRank, RankGpu
from dsdoctor.machine.facts import Device, GpuProcess, MachineFacts
from tests.diagnoses.examples import found

GIB = 1 << 30
NOTEBOOK = GpuProcess(uuid="u1", pid=4711, name="/usr/bin/python3", used_bytes=70 * GIB)
ELSEWHERE = GpuProcess(uuid="another", pid=4712, name="python", used_bytes=70 * GIB)


def machine(*free: int | None, processes: tuple[GpuProcess, ...] = ()) -> Case:
    """GPUs of 80 GiB with so many GiB free."""
    devices = tuple(
        Device(index=i, uuid=f"u{i}", name="A100", total_bytes=80 * GIB, free_bytes=None if f is None else f * GIB)
        for i, f in enumerate(free)
    )
    return Case(machine=MachineFacts(accelerator="cuda", devices=devices, gpu_processes=processes))


def ranks(*free: int) -> Case:
    gpus = [RankGpu(uuid="", free_bytes=f * GIB, total_bytes=80 * GIB) for f in free]
    found = tuple(CommRank(rank=i, host=f"node{i}", gpu=gpu) for i, gpu in enumerate(gpus))
    return Case(comm=CommFacts(world_size=len(free), ranks=found))


ONLY_LINTED = Case(machine=replace(machine(9).machine, accelerator=None))
NEARLY_FULL = machine(79, 9, processes=(NOTEBOOK, ELSEWHERE))
POSITIVE = {"memory/gpu-occupied": [NEARLY_FULL, machine(9, 9), machine(60), ranks(79, 9)]}
NEGATIVE = {
    "memory/gpu-occupied": [
        machine(),
        machine(80, 79),
        machine(None),
        ranks(79, 78),
        machine(79, processes=(ELSEWHERE,)),
        ONLY_LINTED,
    ]
}


@pytest.mark.parametrize("case", POSITIVE["memory/gpu-occupied"])
def test_positive(case):
    (finding,) = found(case, "memory/gpu-occupied")
    assert finding.evidence
    assert finding.fixes


@pytest.mark.parametrize("case", NEGATIVE["memory/gpu-occupied"])
def test_negative(case):
    assert found(case, "memory/gpu-occupied") == []


def test_who_uses_it_and_how_much():
    (finding,) = found(NEARLY_FULL, "memory/gpu-occupied")
    assert finding.severity == "warning"
    assert finding.cause == "71.0 GiB of 80.0 GiB of GPU 1 (A100) are in use"
    assert [one.text for one in finding.evidence] == [
        "GPU 1: 9.0 GiB free",
        "process 4711 (/usr/bin/python3) holds 70.0 GiB",
    ]


def test_less_than_half_is_only_good_to_know():
    (finding,) = found(machine(60), "memory/gpu-occupied")
    assert finding.severity == "info"


def test_the_rank_and_its_host():
    (finding,) = found(ranks(79, 9), "memory/gpu-occupied")
    assert finding.cause == "71.0 GiB of 80.0 GiB of the GPU of rank 1 on node1 are in use"
