"""Memory that ran out, on the device and on the host, as exceptions, kills and warnings show it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from dsdoctor.case import Case
from dsdoctor.diagnoses import context, memory_numbers
from dsdoctor.diagnoses.base import Diagnosis
from dsdoctor.diagnoses.forms import MAX_EVIDENCE, Form, TextDiagnosis
from dsdoctor.diagnoses.peers import roots
from dsdoctor.diagnoses.processes import KILL, Ending, memory_curve, memory_verdict
from dsdoctor.diagnoses.standing import where
from dsdoctor.finding import Evidence, Finding, Fix
from dsdoctor.frames import passes_through
from dsdoctor.logs.facts import LogEvent
from dsdoctor.runs.facts import Failure, Run

ABSURD_BYTES = 2**48
"""256 TiB: more than any device or host has. A request above it is a corrupt size."""
FLUSHES_THAT_COUNT = 3

_OVERFLOWED = r"Storage size calculation overflowed with sizes="
_PREFIXES = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5, "E": 6}
_ASKED = re.compile(
    r"(?:[Tt]ried to allocate|[Uu]nable to allocate|failed to allocate) (?P<size>[\d.]+) ?(?P<prefix>[KMGTPE]?)i?[Bb]"
)
_SET_UP = (
    r"deepspeed[/\\]__init__\.py:initialize|:initialize_optimizer_states|:_configure_(?:zero_)?optimizer"
    r"|:_configure_distributed_model|:from_pretrained|:_prepare_deepspeed|partition_parameters\.py"
)
_STEP = r"engine\.py:(?:forward|backward|step):|autograd[/\\]__init__\.py:backward|:training_step:|:_call_impl:"
_OPTIMIZER_STATES = r":initialize_optimizer_states|exp_avg|:_init_group:"
_DEVICE_FORMS = (
    Form(message=r"(?:CUDA|HIP|XPU|NPU) out of memory"),
    Form(message=r"CUDA error: out of memory|Cuda failure (?:\d+ )?'out of memory'"),
    Form(message=r"CUBLAS_STATUS_ALLOC_FAILED|cudaErrorMemoryAllocation"),
    Form(types=("OutOfMemoryError",)),
)
_MORE_SHARDING = Fix(
    text="shard more, or move the optimizer states to the host: a higher ZeRO stage, offload_optimizer, more GPUs",
    patch={"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}},
)


_DEFRAGMENT = Fix(text="let the allocator grow its pieces: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True")
_OTHERS = Fix(
    text="see who else uses this GPU (nvidia-smi), an earlier run of the job that is still there for instance"
)
_IN_FIRST_STEP = "the GPU ran out of memory when the first step created the optimizer states: the batch plays no part"


class _DeviceOutOfMemory(TextDiagnosis):
    """What both kinds share: the figures of the message, and what follows from them."""

    forms = _DEVICE_FORMS

    def told(self, case: Case, claimed: list[Failure], events: list[LogEvent]) -> Finding:
        found = super().told(case, claimed, events)
        figures = memory_numbers.device_memory(claimed[0].message)
        if not figures.told():
            return found
        fixes = ((_DEFRAGMENT,) if figures.fragmented else ()) + ((_OTHERS,) if figures.others is not None else ())
        return replace(found, cause=f"{found.cause} ({figures.told()})", fixes=(*fixes, *found.fixes))


class GpuOomInit(_DeviceOutOfMemory):
    """The GPU ran out of memory while the model was loaded or DeepSpeed set up its states.

    What it is: weights, fp32 masters and optimizer states do not fit. Activations do not exist yet, so a smaller batch
    cannot help.

    What proves it: an out-of-memory error whose traceback goes through `deepspeed.initialize`, the creation of
    optimizer states or the loading of the model, not through a step.

    When it could be wrong: other processes may hold the memory; compare "in use" in the message with what this process
    has allocated.

    What to do: a higher ZeRO stage, offloading, more GPUs. `dsdoctor triage --stages memory` computes what fits.
    """

    id = "memory/gpu-oom-init"
    severity = "error"
    title = "the GPU ran out of memory during set-up"
    cause = "the GPU ran out of memory while states were set up, before the first batch: the batch size plays no part"
    fixes = (_MORE_SHARDING, Fix(text="compute what fits: dsdoctor triage DS_CONFIG TRAIN.py --stages memory"))
    keys = ("zero_optimization.stage", "zero_optimization.offload_optimizer")

    def applies(self, failure: Failure, case: Case) -> bool:
        return not is_absurd(failure) and happened_at_set_up(failure, case)


class GpuOomStep(_DeviceOutOfMemory):
    """The GPU ran out of memory in forward, backward or step.

    What it is: weights and states fit, and activations, gradients or temporary buffers on top of them do not.

    What proves it: an out-of-memory error whose traceback goes through a step.

    When it could be wrong: Adam's states are made in the first `step()` (DeepSpeed 0.14 and later); an error there is
    about states, and the finding says so. A large "reserved but unallocated" points at fragmentation.

    What to do: a smaller micro-batch with more accumulation, activation checkpointing, then a higher stage or
    offloading.
    """

    id = "memory/gpu-oom-step"
    severity = "error"
    title = "the GPU ran out of memory in a training step"
    cause = "the GPU ran out of memory in a training step: activations, gradients or buffers on top of the states"
    fixes = (
        Fix(text="smaller train_micro_batch_size_per_gpu with more gradient_accumulation_steps"),
        Fix(text="activation (gradient) checkpointing"),
        _MORE_SHARDING,
    )
    keys = ("train_micro_batch_size_per_gpu", "zero_optimization.stage")

    def applies(self, failure: Failure, case: Case) -> bool:
        return not is_absurd(failure) and not happened_at_set_up(failure, case)

    def told(self, case: Case, claimed: list[Failure], events: list[LogEvent]) -> Finding:
        found = super().told(case, claimed, events)
        if not passes_through(claimed[0].frames, _OPTIMIZER_STATES):
            return found
        return replace(
            found,
            cause=found.cause.replace(self.cause, _IN_FIRST_STEP),
            fixes=tuple(fix for fix in found.fixes if fix not in self.fixes or fix is _MORE_SHARDING),
        )


class BogusAllocation(TextDiagnosis):
    """An absurd amount of memory was asked for: a corrupt size, not a lack of memory.

    What it is: a shape or an index that was computed from garbage (uninitialised values, an overflow, labels used as
    sizes) asks for exabytes.

    What proves it: a request above 256 TiB, more than any machine has, or one whose bytes no 64-bit number can count.

    When it could be wrong: it is not memory in any case.

    What to do: print the shapes at the line of the traceback; look for sizes taken from data.
    """

    id = "memory/bogus-allocation"
    severity = "error"
    title = "an absurd amount of memory was asked for"
    forms = (Form(message=_ASKED.pattern), Form(message=_OVERFLOWED))
    confidence = 0.95
    cause = "an allocation of {size} {prefix}B was asked for: a corrupt size, not a lack of memory"
    fixes = (Fix(text="print the sizes at that line: one of them comes from data or overflowed"),)

    def applies(self, failure: Failure, case: Case) -> bool:
        return is_absurd(failure)

    def tell(self, groups: Mapping[str, str]) -> str:
        if not groups:
            return (
                "a tensor of more bytes than a 64-bit number counts was asked for: a corrupt size, not a lack of memory"
            )
        return super().tell(groups)


class AllocatorPressure(TextDiagnosis):
    """PyTorch's allocator had to flush its cache in step after step: the GPU is effectively full.

    What it is: ZeRO-3 warns "pytorch allocator cache flushes since last step". Each flush costs time and is a herald
    of running out of memory.

    What proves it: the warning in several steps.

    When it could be wrong: one flush in the first steps is normal.

    What to do: free some head-room: smaller micro-batch or buckets, or `get_accelerator().empty_cache()` on all ranks
    at the same point of each step.
    """

    id = "memory/allocator-pressure"
    severity = "warning"
    title = "the GPU's memory is full: the allocator flushes its cache again and again"
    kinds = ("cache-flush",)
    cause = "the allocator flushed its cache in step after step: the GPU's memory is effectively full"
    fixes = (
        Fix(text="a smaller micro-batch, or smaller stage3_max_live_parameters and bucket sizes"),
        Fix(text="call get_accelerator().empty_cache() at the same point of the step on every rank"),
    )
    keys = ("train_micro_batch_size_per_gpu",)

    def examine(self, case: Case) -> Iterator[Finding]:
        events = self.events(case)
        if sum(event.count for event in events) >= FLUSHES_THAT_COUNT:
            yield self.told_by_events(case, events)


class HostOomKill(Diagnosis):
    """The kernel, or the container's memory limit, killed a process for lack of host memory.

    What it is: a rank ends with -9 (137 in a shell or container, 247 from the `deepspeed` command) without a traceback.
    Loading the model alone can do it: ranks on the node times the full model, without any offloading. With offloading
    come 16 to 20 bytes a parameter, and pinned buffers rounded up to powers of two. It is host memory: a full GPU
    raises a Python exception.

    What proves it: the counter of out-of-memory kills grew, the kernel or the scheduler says so, or host memory was
    nearly full at the end. In a run of its own dsdoctor ends the ranks just before that, and shows the curve.

    When it could be wrong: with the exit code alone a user, a watchdog or a scheduler may have sent the signal; the
    kernel log (`dmesg`), `memory.events` of the cgroup or the scheduler's accounting settle it.

    What to do: `dsdoctor triage --stages memory` computes the need; more memory or swap, `zero.Init` or low-memory
    loading, fewer ranks while loading, NVMe instead of CPU offload.
    """

    id = "memory/host-oom-kill"
    severity = "error"
    title = "a process was killed for lack of host memory"
    forms = (
        Form(message=r"DefaultCPUAllocator: (?:can't|not enough memory)|std::bad_alloc"),
        Form(types=("MemoryError", "ArrayMemoryError")),
        Form(types=("OSError",), message=r"Cannot allocate memory"),
        Form(message=r"DataLoader worker .* is killed by signal: Killed"),
    )
    _keys = ("zero_optimization.offload_optimizer", "zero_optimization.offload_param")
    _fixes = (
        Fix(text="compute the need of the host: dsdoctor triage DS_CONFIG TRAIN.py --stages memory"),
        Fix(text="load the model once or sharded (zero.Init, low-memory loading), or with fewer ranks at a time"),
        Fix(text="more memory or swap for the host or container; offload to NVMe instead of the CPU"),
    )

    def claims(self, failure: Failure, case: Case) -> bool:
        return not is_absurd(failure) and any(form.match(failure) for form in self.forms)

    def examine(self, case: Case) -> Iterator[Finding]:
        run = context.own_run(case)
        if run is not None and run.outcome == "out-of-memory":
            yield self._ended_before(run)
            return
        refused = [failure for failure in context.failures(case) if self.claims(failure, case)]
        if refused:
            proof = tuple(map(context.evidence, refused))
            yield self._found("host memory ran out: an allocation was refused", proof, 0.85, None)
            return
        yield from self._killed(case)

    def _ended_before(self, run: Run) -> Finding:
        """dsdoctor ended the run before the kernel had to."""
        left = min((sample.available_bytes for sample in run.memory), default=0)
        stacks = tuple(where(run, rank) for rank in run.ranks if rank.stack)
        return self.finding(
            title="host memory runs out",
            cause=f"the run used up the memory of the host (or the limit of its container): {left / 2**30:.2f} GiB were "
            "left when dsdoctor ended it, before the kernel would have killed a process",
            evidence=(Evidence(source=run.leg, text=memory_curve(run)), *stacks)[:MAX_EVIDENCE],
            confidence=0.9,
            caveat="Other programs on this machine use the same memory.",
            fixes=self._fixes,
            keys=self._keys,
        )

    def _killed(self, case: Case) -> Iterator[Finding]:
        killed = roots(case, KILL)
        said = list(case.logs.of_kind("oom-kill")) if case.logs is not None else []
        run = context.own_run(case)
        verdict = memory_verdict(run) if run is not None and killed else None
        if verdict is not None and run is not None:
            if verdict.out_of_memory:
                measured = tuple(
                    Evidence(source=run.leg, text=text) for text in (verdict.text, memory_curve(run)) if text
                )
                measured = (killed[0].evidence, *measured)
                who = killed[0].who
                yield self._found(f"{who} was killed for lack of host memory", measured, verdict.confidence, None)
            return
        if said:
            proof = (*(event.evidence() for event in said), *(ending.evidence for ending in killed))
            yield self._found("the kernel or the scheduler killed a process for lack of host memory", proof, 0.95, None)
        elif killed:
            yield self._by_code(case, killed)

    def _by_code(self, case: Case, killed: list[Ending]) -> Finding:
        """Nothing but the exit code says so; a sum of what was needed makes it likelier."""
        text = f"{killed[0].who} was killed (-9) without a traceback, which is most often a lack of host memory"
        proof = (*(ending.evidence for ending in killed[:1]), *self._last_phase(case))
        needed = memory_numbers.host_sum(case.logs) if case.logs is not None else None
        if needed is None or not needed.tight:
            return self._found(text, (*proof, *(ending.evidence for ending in killed[1:])), 0.6, _ONLY_A_CODE)
        return self._found(f"{text}; {needed.told()}", (*proof, *needed.evidence), 0.8, _ONLY_A_CODE)

    def _last_phase(self, case: Case) -> tuple[Evidence, ...]:
        """The last thing that DeepSpeed said it was about to do."""
        events = list(case.logs.of_kind("memory-phase")) if case.logs is not None else []
        return (max(events, key=lambda event: event.order).evidence(),) if events else ()

    def _found(self, cause: str, proof: tuple[Evidence, ...], confidence: float, caveat: str | None) -> Finding:
        return self.finding(
            cause=cause,
            evidence=proof[:MAX_EVIDENCE],
            confidence=confidence,
            caveat=caveat,
            fixes=self._fixes,
            keys=self._keys,
        )


_ONLY_A_CODE = (
    "The exit code alone does not say who sent SIGKILL: a scheduler, a watchdog or a person may have. dmesg, the "
    "cgroup's memory.events or the scheduler's accounting settle it."
)


def asked_bytes(failure: Failure) -> float | None:
    """How many bytes an allocation that failed had asked for, None if the message does not say."""
    match = _ASKED.search(failure.message)
    return float(match["size"]) * 1024.0 ** _PREFIXES[match["prefix"]] if match else None


def is_absurd(failure: Failure) -> bool:
    """True if the size asked for cannot be meant."""
    if re.search(_OVERFLOWED, failure.message):
        return True
    size = asked_bytes(failure)
    return size is not None and size >= ABSURD_BYTES


def happened_at_set_up(failure: Failure, case: Case) -> bool:
    """True if memory ran out before the first step; where the traceback does not tell, by what was done before."""
    if passes_through(failure.frames, _SET_UP):
        return True
    if passes_through(failure.frames, _STEP):
        return False
    run = context.own_run(case)
    if run is not None:
        return not any(rank.last_step for rank in run.ranks)
    return failure.step is None and (case.logs is None or case.logs.steps_seen == 0)


DIAGNOSES: tuple[Diagnosis, ...] = (
    BogusAllocation(),
    GpuOomInit(),
    GpuOomStep(),
    HostOomKill(),
    AllocatorPressure(),
)
