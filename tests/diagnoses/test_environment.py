"""Devices, packages, hubs, limits and op builds of hand-made machines."""

from dataclasses import replace

import pytest

from dsdoctor.case import Case
from dsdoctor.comm.facts import CommFacts, CommRank, CommStep
from dsdoctor.dsconfig.facts import ConfigFacts
from dsdoctor.machine.facts import Device, MachineFacts, NotCollected, OpBuild
from dsdoctor.runs.facts import Frame, RankRun, Step
from tests.diagnoses.examples import found
from tests.diagnoses.test_comm import failed, job

GIB = 1 << 30
CPU = MachineFacts(
    versions={"torch": "2.13.0+cpu", "deepspeed": "0.19.8"},
    accelerator="cpu",
    memlock="unlimited",
    shm_total=16 * GIB,
    shm_free=16 * GIB,
)
GPUS = replace(CPU, accelerator="cuda", devices=tuple(Device(index=i, name="A100") for i in range(2)))
DEVICE_STEP = CommStep(name="device", status="failed", text="RuntimeError: Found no NVIDIA driver on your system.")
REFUSED = CommFacts(world_size=1, ranks=(CommRank(rank=0, exit_code=1, steps=(DEVICE_STEP,)),))
HUB = Frame(file="/env/site-packages/huggingface_hub/file_download.py", line=3, function="get", text="session.get(url)")
OFFLOAD = ConfigFacts(path="ds.json", data={"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}})
NATIVE = {"DS_PIN_MEMORY_BACKEND": "native"}


def machine(base: MachineFacts = CPU, **values) -> Case:
    return Case(machine=replace(base, **values))


def missed(probe: str, why: str) -> Case:
    return machine(not_collected=(NotCollected(probe=probe, why=why),), accelerator=None)


def op(**values) -> Case:
    base = {"name": "cpu_adam", "needed_by": "optimizer.type", "compatible": True}
    return machine(ops=(OpBuild(**(base | values)),))


FUSED_LAMB = op(name="FusedLamb", compatible=False, implemented=False)
NO_NINJA = op(missing=("ninja",))
NO_LIBAIO = op(name="async_io", compatible=False, problem="[WARNING] async_io requires the dev libaio .so object")
NO_TOOLKIT = op(name="fused_adam", missing=("CUDA_HOME",))
OTHER_TOOLKIT = op(compatible=False, problem="CUDAMismatchException: Installed CUDA version 11.8 does not match ...")
BUILT = op(installed=True, missing=("ninja",))
BUILDABLE = op()

POSITIVE: dict[str, list[Case]] = {
    "environment/no-device": [
        failed("RuntimeError", "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU"),
        failed("AssertionError", "Torch not compiled with CUDA enabled"),
        failed("MisconfigurationException", "No supported gpu backend found!"),
        failed("RuntimeError", "CUDA error: no CUDA-capable device is detected"),
        failed("RuntimeError", "The NVIDIA driver on your system is too old (found version 11040)."),
        failed("RuntimeError", "Distributed package doesn't have NCCL built in"),
        Case(machine=CPU, comm=CommFacts(world_size=2, asked_device="cuda")),
        Case(machine=CPU, comm=REFUSED),
        machine(environment={"DS_ACCELERATOR": "cuda"}),
    ],
    "environment/offline": [
        failed("OSError", "We couldn't connect to 'https://huggingface.co' to load the files, and couldn't find them"),
        failed("huggingface_hub.errors.LocalEntryNotFoundError", "An error happened while trying to locate the file"),
        failed("requests.exceptions.ConnectionError", "HTTPSConnectionPool: Max retries exceeded", HUB),
    ],
    "environment/cannot-import": [
        missed("accelerator", "ImportError: libcudart.so.11.0: cannot open shared object file"),
        missed("torch and DeepSpeed", "RuntimeError: the process was ended by signal 11"),
    ],
    "environment/cpu-only": [machine(), machine(driver_devices=GPUS.devices)],
    "environment/small-shm": [machine(shm_total=64 << 20), machine(GPUS, shm_total=256 << 20)],
    "environment/low-memlock": [machine(memlock=8 << 20)],
    "build/op-unavailable": [FUSED_LAMB],
}
NEGATIVE: dict[str, list[Case]] = {
    "environment/no-device": [
        Case(),
        machine(),
        machine(GPUS, environment={"DS_ACCELERATOR": "cuda"}),
        Case(machine=GPUS, comm=CommFacts(world_size=2, asked_device="cuda")),
        Case(machine=MachineFacts(), comm=CommFacts(world_size=2, asked_device="cuda")),  # torch was never asked
        failed("RuntimeError", "CUDA out of memory. Tried to allocate 2.00 GiB"),
    ],
    "environment/offline": [
        Case(),
        failed("requests.exceptions.ConnectionError", "Max retries exceeded with url: /my-own-service"),
        failed("OSError", "bert-bas is not a local folder and is not a valid model identifier", HUB),
    ],
    "environment/cannot-import": [
        machine(),
        missed("torch and DeepSpeed", "TimeoutError: no answer within 60 s"),
        missed("nvidia-smi", "RuntimeError: nvidia-smi ended with 9"),
    ],
    "environment/cpu-only": [machine(GPUS), Case(machine=MachineFacts()), Case()],
    "environment/small-shm": [machine(), machine(shm_total=None)],
    "environment/low-memlock": [machine(), machine(memlock=None), machine(memlock=1 << 30)],
    "build/op-unavailable": [BUILDABLE, BUILT, NO_NINJA, machine()],
}


@pytest.mark.parametrize(("identifier", "case"), [(i, c) for i, cases in POSITIVE.items() for c in cases])
def test_positive(identifier, case):
    (finding,) = found(case, identifier)
    assert finding.evidence


@pytest.mark.parametrize(("identifier", "case"), [(i, c) for i, cases in NEGATIVE.items() for c in cases])
def test_negative(identifier, case):
    assert found(case, identifier) == []


def severity(case: Case, identifier: str) -> str:
    (finding,) = found(case, identifier)
    return finding.severity


def test_risks_of_the_machine_are_info_unless_the_job_needs_more():
    assert severity(machine(), "environment/cpu-only") == "info"
    assert severity(machine(GPUS, shm_total=256 << 20), "environment/small-shm") == "info"
    assert (
        severity(machine(replace(GPUS, devices=GPUS.devices[:1]), shm_total=64 << 20), "environment/small-shm")
        == "info"
    )
    assert severity(machine(GPUS, shm_total=64 << 20), "environment/small-shm") == "warning"
    low = replace(CPU, memlock=8 << 20)
    assert severity(Case(machine=low), "environment/low-memlock") == "info"
    assert severity(Case(machine=low, config=OFFLOAD), "environment/low-memlock") == "info"
    assert severity(Case(machine=replace(low, environment=NATIVE)), "environment/low-memlock") == "info"
    assert (
        severity(Case(machine=replace(low, environment=NATIVE), config=OFFLOAD), "environment/low-memlock") == "warning"
    )


@pytest.mark.parametrize(
    ("case", "identifier"),
    [
        (FUSED_LAMB, "build/op-unavailable"),
        (NO_NINJA, "build/compiler"),
        (NO_LIBAIO, "build/compiler"),
        (NO_TOOLKIT, "build/cuda-home"),
        (OTHER_TOOLKIT, "build/cuda-mismatch"),
    ],
)
def test_each_obstacle_to_a_build_has_one_diagnosis(case, identifier):
    ids = ("build/op-unavailable", "build/compiler", "build/cuda-home", "build/cuda-mismatch")
    assert [i for i in ids if found(case, i)] == [identifier]


def test_a_job_that_made_a_step_has_its_ops():
    trained = job(RankRun(rank=0, steps=(Step(index=0),)), outcome="stopped")
    assert found(replace(trained, machine=NO_NINJA.machine), "build/compiler") == []


def test_the_key_and_the_way_out_are_named():
    (finding,) = found(op(missing=("c++",)), "build/compiler")
    assert finding.keys == ("optimizer.type",)
    assert finding.fixes[0].patch == {"optimizer": {"params": {"torch_adam": True}}}
