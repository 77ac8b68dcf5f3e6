"""Misuse that only ZeRO-3 punishes: parameters that are not there outside the engine, and diverging ranks."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from dsdoctor.case import Case
from dsdoctor.diagnoses import before_run, context
from dsdoctor.diagnoses.base import Diagnosis
from dsdoctor.diagnoses.forms import Form, TextDiagnosis
from dsdoctor.finding import Finding, Fix
from dsdoctor.frames import passes_through
from dsdoctor.runs.facts import Failure

STAGE = "zero_optimization.stage"
EMPTY = re.compile(
    r"size of tensor [ab] \(0\)"
    r"|shape '\[[^\]]*\]' is invalid for input of size 0"
    r"|'weight' must be 2-D"
    r"|mat2 must be a matrix, got 1-D"
    r"|expected (?:tensor )?\[?\d+\]? and src \[0\] to have the same number of elements"
    r"|got weight of shape \[0\]|weight of size \[0\]|torch\.Size\(\[0\]\)|with size 0\b|got:? \[0\]"
    r"|mat1 and mat2 shapes cannot be multiplied \(.*(?:x0|and 0x|and 0\b).*\)"
    r"|weight should have at least three dimensions"
    r"|vec \(0\)|size mismatch, got .*\(?0\)?|cannot reshape tensor of 0 elements|has 0 elements"
)
"""What torch says when a parameter of size 0 is used, which is what a partitioned one looks like."""

_UNMISTAKABLE = re.compile(
    r"'weight' must be 2-D|mat2 must be a matrix, got 1-D|got weight of shape \[0\]"
    r"|weight should have at least three dimensions|current model is torch\.Size\(\[0\]\)"
    r"|which has shape torch\.Size\(\[0\]\)"
)
_FILE_IS_EMPTY = re.compile(
    r"copying a param with shape torch\.Size\(\[0\]\) from checkpoint"
    r"|Trying to set a tensor of shape torch\.Size\(\[0\]\)"
    r"|copying a param with shape torch\.Size\(\[1\]\) from checkpoint, the shape in current model is torch\.Size\("
    r"\[(?:\d{2,}|\d+(?:, \d+)+)\]\)(?:[\s\S]*shape torch\.Size\(\[1\]\) from checkpoint)"
)
"""A weight of the saved file without elements (releases before 0.5 left one; a single such weight may be real)."""
_RECOMPUTED = "recomputed metadata: "
"""A weight that is empty in the recomputed forward pass of a checkpoint only: `autograd/recompute-mismatch`."""
_ENGINE = r"deepspeed[/\\]runtime[/\\](?:engine|hybrid_engine|pipe[/\\]engine)\.py:(?:forward|__call__|train_batch)"
_GATHER = Fix(
    text="gather the parameter where it is used: with deepspeed.zero.GatheredParameters([weight]): ..., on every rank; "
    "or use it inside the forward of the module that owns it"
)
_STAGE_2 = Fix(text="or stay below stage 3, where parameters are whole", patch={"zero_optimization": {"stage": 2}})


class EmptyWeightsInModel(TextDiagnosis):
    """A partitioned parameter is used outside the module that owns it, so its tensor has size 0.

    What it is: under ZeRO-3 each rank holds a part of every parameter, and `param.data` has the shape (0,) except while
    its own module is in forward or backward inside the engine. Code that touches it elsewhere (a weight shared by hand,
    a regularisation term, an initialisation, loading a state dict) sees an empty tensor.

    What proves it: torch's message about a size of 0 for a parameter, under stage 3; on loading, the model's side is
    `[0]` and the file's is full. Transformers' warning "newly initialized because the shapes did not match" with `[0]`
    in the model says the same, and the run then trains random weights without an error.

    When it could be wrong: an empty batch gives similar messages about activations.

    What to do: gather it with `deepspeed.zero.GatheredParameters` on all ranks, or register it as an external
    parameter; load the full weights before partitioning. `ignore_mismatched_sizes` only leaves random weights.
    """

    id = "zero3/empty-weights-in-model"
    severity = "error"
    title = "a partitioned parameter is used where it has size 0"
    forms = (
        Form(message=r"copying a param with shape torch\.Size\(\[(?!0\]).*?current model is torch\.Size\(\[0\]\)"),
        Form(message=EMPTY.pattern),
    )
    kinds = ("empty-in-model",)
    cause = "a parameter that ZeRO-3 has partitioned is used outside its module, where its tensor has size 0"
    fixes = (_GATHER, _STAGE_2)
    keys = (STAGE,)

    def applies(self, failure: Failure, case: Case) -> bool:
        if _empty_in_checkpoint(failure) or _in_unwrapped_module(failure) or _RECOMPUTED in failure.message:
            return False
        known = context.stage(case)
        return known == 3 or (known is None and _UNMISTAKABLE.search(failure.message) is not None)


class EmptyWeightsInCheckpoint(TextDiagnosis):
    """The saved file holds empty tensors: it was written from partitioned parameters.

    What it is: `state_dict()` of a ZeRO-3 module has tensors of size 0 (1 in old releases) unless they are gathered
    before saving.

    What proves it: on loading, the checkpoint's shape is `[0]` and the model's is full. Before a run, a script that
    saves what it got from `deepspeed.initialize` without gathering it.

    When it could be wrong: it is not; if the *model* has `[0]` and the file is full, it is `empty-weights-in-model`,
    and the remedy is the opposite.

    What to do: rebuild the weights with `zero_to_fp32.py` from the ZeRO checkpoint, and gather on saving
    (`stage3_gather_16bit_weights_on_model_save`, `engine.save_16bit_model`).
    """

    id = "zero3/empty-weights-in-checkpoint"
    severity = "error"
    title = "the checkpoint holds empty tensors"
    forms = (Form(message=_FILE_IS_EMPTY.pattern),)
    kinds = ("empty-in-file",)
    confidence = 0.95
    cause = "the weights file holds tensors of shape [0]: it was saved from partitioned ZeRO-3 parameters"
    fixes = (
        Fix(text="rebuild the weights from the ZeRO checkpoint: python zero_to_fp32.py CHECKPOINT_DIR OUT"),
        Fix(
            text="gather when saving",
            patch={"zero_optimization": {"stage3_gather_16bit_weights_on_model_save": True}},
        ),
    )
    keys = ("zero_optimization.stage3_gather_16bit_weights_on_model_save",)

    def examine(self, case: Case) -> Iterator[Finding]:
        yield from super().examine(case)
        yield from before_run.saves_partitioned(self, case)


class ModuleOutsideEngine(TextDiagnosis):
    """A second model was built partitioned, but is not run by an engine.

    What it is: a reference, teacher or encoder model built inside `deepspeed.zero.Init` (Transformers does that for
    every model once a stage-3 config is active) has empty weights, and only an engine gathers them.

    What proves it: a module is called, not through DeepSpeed's engine, and its weights have size 0.

    When it could be wrong: a weight used by hand inside a wrapped model looks similar; there the traceback goes through
    the engine.

    What to do: wrap it with `deepspeed.initialize` too (an inference config will do), or build it outside the context.
    """

    id = "zero3/module-outside-engine"
    severity = "error"
    title = "a partitioned module is used without an engine"
    forms = (Form(message=EMPTY.pattern),)
    cause = "a module with partitioned (empty) weights is called directly, not through a DeepSpeed engine"
    fixes = (
        Fix(text="wrap the second model with deepspeed.initialize as well, or build it outside zero.Init"),
        Fix(text="call the engine, not the bare module"),
    )
    keys = (STAGE,)

    def applies(self, failure: Failure, case: Case) -> bool:
        known = context.stage(case)
        stage3 = known == 3 or (known is None and _UNMISTAKABLE.search(failure.message) is not None)
        return stage3 and _in_unwrapped_module(failure) and not _empty_in_checkpoint(failure)


class InflightParams(TextDiagnosis):
    """ZeRO-3 lost track of which parameters are gathered.

    What it is: parameters were fetched in another order than in the steps before (early exits, conditional layers,
    hooks on some ranks, user code that touches `.data`), so one is still in flight or not in the expected state.

    What proves it: DeepSpeed's own check of the parameter's state (an AssertionError with `'status': 'INFLIGHT'`), its
    queue of parameters that runs empty ("pop from an empty deque"), or its refusal to free a parameter that a module
    works with ("Cannot free a ZeRO-3 parameter while it is still active").

    When it could be wrong: releases before 0.15.3 also fail on harmless early exits.

    What to do: keep the order of modules the same in every step; declare modules with data-dependent control flow as
    leaf modules (`zero_optimization.leaf_module`, `set_z3_leaf_modules`). Leave `GatheredParameters` out of a forward
    pass: the module's own parameters are whole there. Around it, change them only with `modifier_rank=0`.
    """

    id = "zero3/inflight-params"
    severity = "error"
    title = "parameters of ZeRO-3 are in an unexpected state"
    forms = (
        Form(message=r"still have inflight params|tracing error at step \d+"),
        Form(message=r"expected param .* to (?:be|not be) (?:available|inflight|released)|expected to be released"),
        Form(message=r"already in registry|(?P<freed>Cannot free a ZeRO-3 parameter while it is still active)"),
        Form(message=r"attempted to (?:add non-inflight parameter|invalidate already invalid trace|record trace)"),
        Form(types=("AssertionError",), message=r"'status': '?(?:NOT_AVAILABLE|INFLIGHT|AVAILABLE)"),
        Form(types=("IndexError",), message=r"pop from an empty deque", frames=r"partitioned_param_coordinator\.py:"),
    )
    cause = "ZeRO-3 found a parameter in another state than its trace of the modules expects"
    fixes = (
        Fix(text="run the same modules in the same order in every step and on every rank"),
        Fix(text="declare modules with data-dependent control flow as leaf modules (set_z3_leaf_modules)"),
    )
    keys = (STAGE,)

    def tell(self, groups: Mapping[str, str]) -> str:
        if groups.get("freed", "?") != "?":
            return "a parameter was to be partitioned again while a module still worked with it"
        return self.cause

    def remedies(self, groups: Mapping[str, str]) -> tuple[Fix, ...]:
        return _KEEP_GATHERED if groups.get("freed", "?") != "?" else self.fixes


_KEEP_GATHERED = (
    Fix(text="use no GatheredParameters inside a forward pass: a module's own parameters are whole there"),
    Fix(text="change gathered parameters with GatheredParameters(..., modifier_rank=0) only, between steps"),
)


class TiedOrResized(TextDiagnosis):
    """A parameter was created or replaced after ZeRO-3 had partitioned the model.

    What it is: tying weights or resizing embeddings after `zero.Init` makes plain parameters that have none of the
    attributes that ZeRO-3 needs.

    What proves it: an AttributeError about `ds_id`, `ds_shape`, `ds_status` and the like.

    When it could be wrong: an optimizer that was built from another model's parameters fails alike.

    What to do: tie and resize before partitioning, or inside `GatheredParameters`.
    """

    id = "zero3/tied-or-resized"
    severity = "error"
    title = "a parameter was tied, resized or made after partitioning"
    forms = (Form(types=("AttributeError",), message=r"has no attribute '(?P<attribute>ds_(?!opt)\w+)'"),)
    cause = "a parameter lacks {attribute}: it was tied, resized or created after ZeRO-3 had partitioned the model"
    fixes = (Fix(text="tie weights and resize embeddings before zero.Init, or inside GatheredParameters"),)
    keys = (STAGE,)


class LoadConflict(TextDiagnosis):
    """ZeRO-3 and another way of placing the weights exclude each other while a model is loaded.

    What it is: `device_map` or `low_cpu_mem_usage` place whole weights; ZeRO-3 partitions them as they are made.

    What proves it: Transformers' message; before a run the calls in the script's text.

    When it could be wrong: it is not. That nothing is raised does not mean that loading is sharded: for that the
    TrainingArguments (or HfDeepSpeedConfig) must exist before `from_pretrained`.

    What to do: leave `device_map` and `low_cpu_mem_usage` out, and build the arguments first.
    """

    id = "config/zero3-load-conflict"
    severity = "error"
    title = "ZeRO-3 and device_map or low_cpu_mem_usage"
    forms = (
        Form(message=r"(?i)zero-?3 is (?:not compatible|incompatible) with .*(?:low_cpu_mem_usage|device_map)"),
        Form(message=r"(?i)device_map.{0,80}(?:not compatible|cannot be used|incompatible).{0,40}(?:deepspeed|zero)"),
    )
    confidence = 0.95
    cause = "the model is loaded with device_map or low_cpu_mem_usage, which ZeRO-3 excludes"
    fixes = (
        Fix(text="leave device_map and low_cpu_mem_usage out of from_pretrained"),
        Fix(text="build TrainingArguments (or HfDeepSpeedConfig) before from_pretrained, so that loading is sharded"),
    )
    keys = (STAGE,)

    def examine(self, case: Case) -> Iterator[Finding]:
        yield from super().examine(case)
        yield from before_run.load_conflict(self, case)


def _empty_in_checkpoint(failure: Failure) -> bool:
    return _FILE_IS_EMPTY.search(failure.message) is not None


def _in_unwrapped_module(failure: Failure) -> bool:
    """True if a module was called and no engine stands above it in the traceback.

    "'weight' must be 2-D" is what an embedding says: mostly a module, where the traceback is not there.
    """
    called = passes_through(failure.frames, r"torch[/\\]nn[/\\]modules[/\\](?:module\.py:_call_impl|\w+\.py:forward)")
    called = called or (not failure.frames and "'weight' must be 2-D" in failure.message)
    return called and not passes_through(failure.frames, _ENGINE)


DIAGNOSES: tuple[Diagnosis, ...] = (
    EmptyWeightsInCheckpoint(),
    ModuleOutsideEngine(),
    EmptyWeightsInModel(),
    InflightParams(),
    TiedOrResized(),
    LoadConflict(),
)
