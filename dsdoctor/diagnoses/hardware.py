"""Faults of GPUs, and kernels that were given wrong indices or addresses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from dsdoctor.case import Case
from dsdoctor.diagnoses import context
from dsdoctor.diagnoses.base import Diagnosis
from dsdoctor.diagnoses.forms import MAX_EVIDENCE, Form, TextDiagnosis
from dsdoctor.finding import Finding, Fix
from dsdoctor.logs.facts import LogEvent
from dsdoctor.runs.facts import Failure


class GpuFault(TextDiagnosis):
    """A GPU is defective or was lost.

    What it is: uncorrectable memory (ECC) errors, a GPU that fell off the bus, fatal Xid messages of the driver.

    What proves it: the driver's or CUDA's message, nvidia-smi's "GPU is lost", or NCCL's watchdog that ends with CUDA's
    message about ECC or NVLink.

    When it could be wrong: Xid 13, 31 and 43 are mostly errors of the program and are not meant here.

    What to do: take the node out of service (`scontrol update NodeName=... State=DRAIN Reason=xid`); look at
    `nvidia-smi -q -d ECC,PAGE_RETIREMENT,ROW_REMAPPER` and `dmesg | grep -i xid`; reset (`nvidia-smi --gpu-reset -i N`)
    or reboot, and replace the GPU if it comes back.
    """

    id = "hardware/gpu-fault"
    severity = "error"
    title = "a GPU is defective or was lost"
    forms = (
        Form(message=r"(?i)uncorrectable ECC error|GPU has fallen off the bus|GPU is lost"),
        Form(message=r"(?i)CUDA error: (?:uncorrectable|hardware stack error|unspecified launch failure.*ECC)"),
        Form(message=r"CUDA driver error: .*(?:device.*lost|ECC)"),
    )
    kinds = ("gpu-fault",)
    confidence = 0.95
    cause = "the driver reports a defective or lost GPU"
    fixes = (Fix(text="take the node out of service; reset the GPU, look at nvidia-smi -q and dmesg, replace it"),)

    def told_by_events(self, case: Case, events: list[LogEvent]) -> Finding:
        """Errors of CUDA in the same log follow from the fault."""
        followed = [context.evidence(f) for f in context.failures(case) if "CUDA error" in f.message]
        found = super().told_by_events(case, events)
        return replace(found, evidence=(*found.evidence[:2], *followed)[:MAX_EVIDENCE])


class DeviceAssert(TextDiagnosis):
    """A kernel found an index out of range.

    What it is: token ids beyond the embedding, labels beyond the number of classes, a bad gather index. The assertion
    stops the CUDA context, and every later CUDA call fails with the same message, far from the cause.

    What proves it: "device-side assert triggered"; the *first* assertion line names the kernel and the condition.

    When it could be wrong: it is not; later CUDA and NCCL errors are its consequences.

    What to do: compare the largest token id with the vocabulary (`input_ids.max() <
    model.get_input_embeddings().num_embeddings`), labels with the classes, positions with the longest length that the
    model knows; run with `CUDA_LAUNCH_BLOCKING=1` or on the CPU to get the real line.
    """

    id = "cuda/device-assert"
    severity = "error"
    title = "a kernel found an index out of range"
    forms = (Form(message=r"device-side assert triggered"),)
    kinds = ("device-assert",)
    confidence = 0.95
    cause = "an assertion failed inside a CUDA kernel, which nearly always is an index out of range"
    fixes = (
        Fix(text="compare the largest token id with the size of the embedding, and labels with the number of classes"),
        Fix(text="run with CUDA_LAUNCH_BLOCKING=1 (or on the CPU) to see the line that calls the kernel"),
    )

    def told(self, case: Case, claimed: list[Failure], events: list[LogEvent]) -> Finding:
        """The kernel's own line says more than any exception after it."""
        proof = [event.evidence() for event in events[:2]] + list(map(context.evidence, claimed))
        return replace(super().told(case, claimed, events), evidence=tuple(proof[:MAX_EVIDENCE]))


class IllegalAccess(TextDiagnosis):
    """A kernel used an address that is not its own.

    What it is: a defect of a custom kernel or extension, a wrong index in one, or a tensor that was freed too early.

    What proves it: "an illegal memory access was encountered" (or a misaligned address, an illegal instruction, an
    unspecified launch failure), without a device-side assertion before it. It is often told only by NCCL's watchdog,
    whose thread meets the error first and takes the process down (-6).

    When it could be wrong: the line of the traceback is where it was noticed, not where it happened. A failing GPU can
    look the same: if the same rank fails again with other jobs, see `hardware/gpu-fault`.

    What to do: run with `CUDA_LAUNCH_BLOCKING=1`, or under `compute-sanitizer --tool memcheck python ...` with one
    process; leave custom kernels (flash attention, fused ops, `torch.compile`) out one by one; check that their
    versions fit torch.
    """

    id = "cuda/illegal-access"
    severity = "error"
    title = "a kernel used an address that is not its own"
    forms = (
        Form(message=r"an illegal memory access was encountered|cudaErrorIllegalAddress"),
        Form(
            message=r"CUDA error: (?:misaligned address|an illegal instruction was encountered|invalid program counter)"
        ),
        Form(message=r"CUDA error: unspecified launch failure"),
    )
    cause = "a CUDA kernel accessed memory that is not its own"
    fixes = (
        Fix(text="run with CUDA_LAUNCH_BLOCKING=1 or compute-sanitizer to find the kernel; update custom kernels"),
    )

    def examine(self, case: Case) -> Iterator[Finding]:
        """Where a kernel asserted, or the device is lost, a bad address only follows."""
        if not any(DeviceAssert().examine(case)) and not any(GpuFault().examine(case)):
            yield from super().examine(case)


DIAGNOSES: tuple[Diagnosis, ...] = (GpuFault(), DeviceAssert(), IllegalAccess())
