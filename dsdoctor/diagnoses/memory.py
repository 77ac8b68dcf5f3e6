"""Device memory that ran out, or nearly: in set-up, in a step, and the allocator's warnings before that."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from dsdoctor.case import Case
from dsdoctor.diagnoses import context, memory_numbers
from dsdoctor.diagnoses.base import Diagnosis
from dsdoctor.diagnoses.forms import Form, TextDiagnosis
from dsdoctor.diagnoses.memory_request import PINNED, is_absurd
from dsdoctor.finding import Finding, Fix
from dsdoctor.frames import passes_through
from dsdoctor.logs.facts import LogEvent
from dsdoctor.runs.facts import Failure

FLUSHES_THAT_COUNT = 3

_SET_UP = (
    r"deepspeed[/\\]__init__\.py:initialize|:initialize_optimizer_states|:_configure_(?:zero_)?optimizer"
    r"|:_configure_distributed_model|:from_pretrained|:_prepare_deepspeed|:(?:deepspeed_|_)?load_checkpoint:"
)
_STEP = (
    r"engine\.py:(?:forward|backward|step):|autograd[/\\]__init__\.py:backward|:training_step:|:_call_impl:|:forward:"
)
_OPTIMIZER_STATES = r":initialize_optimizer_states|exp_avg|:_init_group:"
_DEVICE_FORMS = (
    Form(message=r"(?:CUDA|HIP|XPU|NPU) out of memory"),
    Form(message=r"CUDA error: out of memory|Cuda failure (?:\d+ )?'out of memory'|Error \[CUDA\]: out of memory"),
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
_GATHERING = Fix(
    text="gather nothing on saving: write the partitions and convert them later with zero_to_fp32.py",
    patch={"zero_optimization": {"stage3_gather_16bit_weights_on_model_save": False}},
)
_EVALUATION = Fix(
    text="a smaller per_device_eval_batch_size, and eval_accumulation_steps so that results leave the GPU"
)
_GENERATION = Fix(text="fewer prompts at a time, or shorter ones: keys and values of all tokens are kept")
_PHASES: tuple[tuple[str, str, tuple[Fix, ...]], ...] = (
    (r":(?:save_\w+|_save\w*|_zero3_consolidated_16bit_state_dict):", "while a checkpoint was written", (_GATHERING,)),
    (r":(?:evaluate|evaluation_loop|prediction_step|validation_step):", "in an evaluation", (_EVALUATION,)),
    (r":generate:", "while text was generated", (_GENERATION,)),
    (r":backward:|_engine_run_backward", "in the backward pass", ()),
    (r":_take_model_step:|[/\\]optim(?:izers)?[/\\]\w+\.py:step:", "in the step of the optimizer", ()),
    (r":forward:|:_call_impl:", "in the forward pass", ()),
)
"""Where in the program memory ran out, by the functions of the traceback, and what to do there first."""
_NO_TRACEBACK = (
    "The traceback is not in this record. That it was in set-up follows only from no step being shown before."
)
_PROBABLY_SET_UP = "the GPU ran out of memory, before the first batch as it seems: no step of training is shown"
_IF_IN_A_STEP = Fix(text="if it came in a step after all: half the micro-batch, twice the gradient accumulation")
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

    What to do: a higher `zero_optimization.stage`, `offload_optimizer`, more GPUs. `dsdoctor memory DS_CONFIG --model
    config.json --gpu 8x80GiB` computes what fits.
    """

    id = "memory/gpu-oom-init"
    severity = "error"
    title = "the GPU ran out of memory during set-up"
    cause = "the GPU ran out of memory while states were set up, before the first batch: the batch size plays no part"
    fixes = (_MORE_SHARDING, Fix(text="compute what fits: dsdoctor triage DS_CONFIG TRAIN.py --stages memory"))
    keys = ("zero_optimization.stage", "zero_optimization.offload_optimizer")

    def applies(self, failure: Failure, case: Case) -> bool:
        return _of_device(failure) and happened_at_set_up(failure, case)

    def told(self, case: Case, claimed: list[Failure], events: list[LogEvent]) -> Finding:
        found = super().told(case, claimed, events)
        if claimed[0].frames:
            return found
        cause = found.cause.replace(self.cause, _PROBABLY_SET_UP)
        return replace(found, cause=cause, confidence=0.5, caveat=_NO_TRACEBACK, fixes=(*found.fixes, _IF_IN_A_STEP))


class GpuOomStep(_DeviceOutOfMemory):
    """The GPU ran out of memory in forward, backward or step.

    What it is: weights and states fit, and activations, gradients or temporary buffers on top of them do not.

    What proves it: an out-of-memory error whose traceback goes through a step; the finding says through which part of
    it, or through an evaluation, a generation or the saving of a checkpoint.

    When it could be wrong: Adam's states are made in the first `step()` (DeepSpeed 0.14 and later); an error there is
    about states, and the finding says so. A large "reserved but unallocated" points at fragmentation.

    What to do: half the `train_micro_batch_size_per_gpu` and twice the `gradient_accumulation_steps` (the same batch),
    `model.gradient_checkpointing_enable()`, then a higher stage or offloading. For fragmentation
    `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`.
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
        return _of_device(failure) and not happened_at_set_up(failure, case)

    def told(self, case: Case, claimed: list[Failure], events: list[LogEvent]) -> Finding:
        found = super().told(case, claimed, events)
        if not passes_through(claimed[0].frames, _OPTIMIZER_STATES):
            return self._in_phase(claimed[0], found)
        return replace(
            found,
            cause=found.cause.replace(self.cause, _IN_FIRST_STEP),
            fixes=tuple(fix for fix in found.fixes if fix not in self.fixes or fix is _MORE_SHARDING),
        )

    def _in_phase(self, failure: Failure, found: Finding) -> Finding:
        """The finding with the part of the program in it that the traceback shows."""
        for frames, told, fixes in _PHASES:
            if passes_through(failure.frames, frames):
                cause = found.cause.replace("in a training step", told, 1)
                return replace(found, cause=cause, fixes=(*fixes, *found.fixes))
        return found


class AllocatorPressure(TextDiagnosis):
    """PyTorch's allocator had to flush its cache in step after step: the GPU is effectively full.

    What it is: ZeRO-3 warns "pytorch allocator cache flushes since last step". Each flush costs time and is a herald
    of running out of memory.

    What proves it: the warning in several steps.

    When it could be wrong: one flush in the first steps is normal.

    What to do: free some head-room: a smaller `train_micro_batch_size_per_gpu`, `stage3_max_live_parameters` or
    `reduce_bucket_size`, `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`; or `get_accelerator().empty_cache()` on
    all ranks at the same point of each step.
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


def _of_device(failure: Failure) -> bool:
    """True where the device's memory can be meant: not for corrupt sizes, nor for pinned memory of the host."""
    return not is_absurd(failure) and PINNED.match(failure) is None


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


DIAGNOSES: tuple[Diagnosis, ...] = (GpuOomInit(), GpuOomStep(), AllocatorPressure())
