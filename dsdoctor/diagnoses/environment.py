"""What is wrong or risky with the machine before the user's code matters: devices, packages, hubs, limits."""

from __future__ import annotations

import re
from collections.abc import Iterator

from dsdoctor.case import Case
from dsdoctor.diagnoses import nodes, op_builds
from dsdoctor.diagnoses.base import Diagnosis
from dsdoctor.diagnoses.forms import Form, TextDiagnosis
from dsdoctor.finding import Evidence, Finding, Fix, Severity
from dsdoctor.machine.facts import MachineFacts
from dsdoctor.machine.ops import offload_device
from dsdoctor.units import size

SOURCE = "environment"
NO_DEVICE_TEXT = (
    r"Found no NVIDIA driver|no CUDA-capable device|not compiled with CUDA|No CUDA GPUs are available"
    r"|invalid device ordinal|NVIDIA driver on your system is too old|doesn't have NCCL built in"
    r"|Unexpected error from cudaGetDeviceCount|system not yet initialized|CUDA driver version is insufficient"
    r"|No supported gpu backend found|DeepSpeed strategy is only supported on CUDA GPUs"
)
_SMALL_SHM = 512 << 20
"""DeepSpeed's own report warns below this."""
_CONTAINER_SHM = 64 << 20
"""What a container gets by default; too little for NCCL or DeepSpeed's CPU communication among ranks."""
_SMALL_MEMLOCK = 64 << 20


class NoDevice(TextDiagnosis):
    """The job asks for a CUDA device, and none (or not that many) is visible to it.

    What proves it: torch's exception (`Found no NVIDIA driver`, a driver too old for this torch, `Unexpected error from
    cudaGetDeviceCount`, `no CUDA-capable device`, `invalid device ordinal`, a build of torch without CUDA or NCCL), or
    a device that was asked for (`--device cuda`, `DS_ACCELERATOR=cuda`) where torch sees no GPU; or a node of a
    communication check that was given more ranks than it has GPUs.

    When it could be wrong: without such a wish DeepSpeed silently chooses its CPU accelerator; that is a finding of its
    own and no error.

    What to do: `nvidia-smi` (the driver), `echo $CUDA_VISIBLE_DEVICES`, `docker run --gpus all`, and `python -c "import
    torch; print(torch.version.cuda, torch.cuda.device_count())"`, where None means a build without CUDA; start no more
    ranks on a node than it has GPUs. Error 802 on a machine with NVSwitch: start `nvidia-fabricmanager`, of the release
    of the driver. Error 804: the container's CUDA is newer than this driver can serve. `dsdoctor env` shows all of it.
    """

    id = "environment/no-device"
    severity = "error"
    title = "no CUDA device is visible to the job"
    forms = (Form(message=NO_DEVICE_TEXT),)
    cause = "the job asks for a CUDA device that torch does not see"
    fixes = (
        Fix(
            text="check the driver (nvidia-smi), the container runtime (--gpus all), CUDA_VISIBLE_DEVICES, "
            "and that torch is a CUDA build"
        ),
        Fix(text="or rehearse on the CPU: --device cpu"),
    )

    def examine(self, case: Case) -> Iterator[Finding]:
        told = list(nodes.too_few_devices(self, case))
        proof = (*_wish(case), *_refused(case))
        if told or not proof:
            yield from told or super().examine(case)
            return
        seen = () if case.machine is None or case.machine.accelerator is None else (_devices(case.machine),)
        yield self.finding(cause=self.cause, evidence=(*proof, *seen), confidence=0.95, fixes=self.fixes)


class Offline(TextDiagnosis):
    """A model or data hub cannot be reached while the job loads from it.

    What proves it: a connection error that comes through the hub's library (`from_pretrained`, `load_dataset`).

    When it could be wrong: retries hide the first failures, and other ranks run into a time-out later, which is a
    consequence. A name that is spelled wrong is answered by the hub and is not meant here.

    What to do: `huggingface-cli download NAME` on a machine with access, copy `~/.cache/huggingface` (`HF_HOME`), set
    `HF_HUB_OFFLINE=1` and `HF_DATASETS_OFFLINE=1`; or give the path of a local copy. Behind a proxy `HTTPS_PROXY`.
    """

    id = "environment/offline"
    severity = "error"
    title = "the model or data hub is unreachable"
    forms = (
        Form(message=r"[Cc]ouldn't connect to '?https?://|Couldn't reach .* on the Hub|offline mode is enabled"),
        Form(types=("LocalEntryNotFoundError", "OfflineModeIsEnabled")),
        Form(
            message=r"Max retries exceeded|Failed to resolve|Name or service not known|Connection|timed out",
            types=("ConnectionError", "ConnectTimeout", "ReadTimeout", "ConnectError", "MaxRetryError", "ProxyError"),
            frames=r"huggingface_hub|transformers[/\\]utils[/\\]hub|[/\\]datasets[/\\]",
        ),
    )
    cause = "the job loads from a model or data hub that cannot be reached"
    fixes = (Fix(text="download before on a machine with access, then set HF_HUB_OFFLINE=1 or give a local path"),)


class CannotImport(Diagnosis):
    """torch or DeepSpeed is installed and cannot be imported by this Python.

    What proves it: a process of the same Python that only imports them ends with an error, which is quoted.

    When it could be wrong: a time-out of that import is not reported here, since a cold disk can be the reason.

    What to do: the message names the library or the version that does not fit; install torch and DeepSpeed for the same
    Python and CUDA.
    """

    id = "environment/cannot-import"
    severity = "error"
    title = "torch or DeepSpeed cannot be imported"

    def examine(self, case: Case) -> Iterator[Finding]:
        if case.machine is None:
            return
        broken = [
            missed
            for missed in case.machine.not_collected
            if (
                missed.probe in ("torch", "accelerator")
                and re.match(r"(ImportError|ModuleNotFoundError|OSError)", missed.why)
            )
            or (missed.probe == "torch and DeepSpeed" and missed.why.startswith("RuntimeError"))
        ]
        if broken:
            yield self.finding(
                cause=f"importing torch and DeepSpeed fails: {broken[0].why}",
                evidence=tuple(Evidence(source=SOURCE, text=f"{missed.probe}: {missed.why}") for missed in broken),
                confidence=0.9,
                fixes=(Fix(text=f"make `{case.machine.executable} -c 'import torch, deepspeed'` work"),),
            )


class CpuOnly(Diagnosis):
    """There is no GPU that torch can use, so DeepSpeed chooses its CPU accelerator, without a word.

    What proves it: torch sees no device.

    When it could be wrong: it is no fault where a rehearsal on the CPU is meant. If the driver does list GPUs, torch is
    a CPU build or `CUDA_VISIBLE_DEVICES` hides them.

    What to do: nothing for a rehearsal. It proves nothing of a GPU's numbers (its kernels in fp16, its memory).
    """

    id = "environment/cpu-only"
    severity = "info"
    title = "no GPU: this is a rehearsal on the CPU"

    def examine(self, case: Case) -> Iterator[Finding]:
        if case.machine is None or case.machine.devices or case.machine.accelerator != "cpu":
            return
        hidden = len(case.machine.driver_devices)
        told = f"although the driver lists {hidden}" if hidden else "and the driver lists none"
        yield self.finding(
            cause=f"torch sees no GPU, {told}; DeepSpeed runs on its CPU accelerator",
            evidence=(_devices(case.machine),),
            confidence=0.95,
        )


class SmallShm(Diagnosis):
    """`/dev/shm` is small: NCCL, DeepSpeed's CPU communication and data-loader workers put their buffers there.

    What proves it: the size of the file system. Below 64 MiB (what a container gets) with several GPUs, or on the CPU
    accelerator, it is a warning.

    When it could be wrong: one rank without data-loader workers needs none of it.

    What to do: `--shm-size=8g` or `--ipc=host` for the container.
    """

    id = "environment/small-shm"
    severity = "info"
    title = "shared memory is small"

    def examine(self, case: Case) -> Iterator[Finding]:
        machine = case.machine
        if machine is None or machine.shm_total is None or machine.shm_total >= _SMALL_SHM:
            return
        shared = len(machine.devices) > 1 or machine.accelerator == "cpu"
        severity: Severity = "warning" if shared and machine.shm_total <= _CONTAINER_SHM else "info"
        yield self.finding(
            severity=severity,
            cause=f"/dev/shm has {size(machine.shm_total)}; ranks of one host and data-loader workers may need more",
            evidence=(
                Evidence(source=SOURCE, text=f"/dev/shm: {size(machine.shm_total)}, {size(machine.shm_free)} free"),
            ),
            confidence=0.7,
            fixes=(Fix(text="start the container with --shm-size=8g or --ipc=host"),),
        )


class LowMemlock(Diagnosis):
    """The limit of locked memory (`ulimit -l`) is low.

    What proves it: the limit. It is a warning only if the config offloads to the CPU or NVMe and
    `DS_PIN_MEMORY_BACKEND=native` makes DeepSpeed lock the buffers itself; CUDA's own pinning is not bound by it.

    When it could be wrong: without that, and without InfiniBand (which locks memory too), nothing needs it.

    What to do: `ulimit -l unlimited`, for a container `--ulimit memlock=-1`.
    """

    id = "environment/low-memlock"
    severity = "info"
    title = "the limit of locked memory is low"

    def examine(self, case: Case) -> Iterator[Finding]:
        machine = case.machine
        if machine is None or not isinstance(machine.memlock, int) or machine.memlock >= _SMALL_MEMLOCK:
            return
        native = machine.environment.get("DS_PIN_MEMORY_BACKEND") == "native" and _offloads(case)
        yield self.finding(
            severity="warning" if native else "info",
            cause=f"locked memory is limited to {size(machine.memlock)}"
            + (", and DS_PIN_MEMORY_BACKEND=native locks the offload buffers" if native else ""),
            evidence=(Evidence(source=SOURCE, text=f"ulimit -l: {size(machine.memlock)}"),),
            confidence=0.7,
            fixes=(Fix(text="ulimit -l unlimited; for a container --ulimit memlock=-1"),),
        )


class OpUnavailable(Diagnosis):
    """The accelerator has no implementation of a compiled op that the config uses.

    What proves it: DeepSpeed's accelerator gives its "not implemented" builder for it, as the CPU accelerator does for
    FusedLamb and FusedLion; loading the op raises.

    When it could be wrong: an optimizer that the script builds itself takes the place of the config's.

    What to do: choose an optimizer that this accelerator has, such as AdamW, or run on a device that has the op.
    """

    id = "build/op-unavailable"
    severity = "error"
    title = "an op that the config uses does not exist for this accelerator"

    def examine(self, case: Case) -> Iterator[Finding]:
        return op_builds.findings(self, case, "no-such-op")


def _wish(case: Case) -> Iterator[Evidence]:
    """The user asks for CUDA, and torch was asked and sees no device."""
    machine = case.machine
    if machine is None or machine.devices or machine.accelerator is None:
        return
    if any(missed.probe == "devices" for missed in machine.not_collected):
        return
    if case.comm is not None and case.comm.asked_device == "cuda":
        yield Evidence(source=SOURCE, text="--device cuda")
    if machine.environment.get("DS_ACCELERATOR") == "cuda":
        yield Evidence(source=SOURCE, text="DS_ACCELERATOR=cuda")


def _refused(case: Case) -> Iterator[Evidence]:
    """A rank of the communication check was refused its device."""
    for rank in case.comm.ranks if case.comm else ():
        step = rank.trouble
        if step is not None and re.search(NO_DEVICE_TEXT, step.text):
            yield Evidence(source="comm", rank=rank.rank, text=f"{step.name}: {step.text}")
            return


def _devices(machine: MachineFacts) -> Evidence:
    visible = machine.environment.get("CUDA_VISIBLE_DEVICES")
    told = f"; CUDA_VISIBLE_DEVICES={visible!r}" if visible is not None else ""
    build = machine.versions.get("cuda") or "none"
    return Evidence(
        source=SOURCE,
        text=f"torch sees {len(machine.devices)} GPUs, the driver {len(machine.driver_devices)}; "
        f"torch is built for CUDA: {build}{told}",
    )


def _offloads(case: Case) -> bool:
    config = case.config.data if case.config else {}
    return any(offload_device(config, key) in ("cpu", "nvme") for key in ("offload_optimizer", "offload_param"))


DIAGNOSES: tuple[Diagnosis, ...] = (
    NoDevice(),
    Offline(),
    CannotImport(),
    CpuOnly(),
    SmallShm(),
    LowMemlock(),
    OpUnavailable(),
)
