"""Keys that stand in a ds_config by the name that another program or an older release gives them.

DeepSpeed ignores them without a word, so that the run goes on without what they ask for.
"""

from __future__ import annotations

from typing import Any

from dsdoctor.dsconfig import batch
from dsdoctor.dsconfig.schema import Schema

_NAMES = {
    "max_grad_norm": "gradient_clipping",
    "clip_grad": "gradient_clipping",
    "clip_grad_norm": "gradient_clipping",
    "gradient_clip_val": "gradient_clipping",
    "per_device_train_batch_size": batch.MICRO,
    "per_gpu_train_batch_size": batch.MICRO,
    "micro_batch_size": batch.MICRO,
    "global_batch_size": batch.TRAIN,
    "accumulate_grad_batches": batch.STEPS,
    "learning_rate": "optimizer.params.lr",
    "zero_stage": "zero_optimization.stage",
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "offload_param_device": "zero_optimization.offload_param.device",
    "tensor_parallel_size": "tensor_parallel.autotp_size",
    "tensor_model_parallel_size": "tensor_parallel.autotp_size",
    "aio.thread_count": "aio.intra_op_parallelism",
}
"""Arguments of Transformers, Accelerate, Lightning and Megatron, and what older releases called a key."""
_NOT_IN_THE_CONFIG = {
    "pipeline_parallel_size": "pipelines are laid out by PipelineModule in the script",
    "pipeline_model_parallel_size": "pipelines are laid out by PipelineModule in the script",
    "gradient_checkpointing": "activation checkpointing is switched on in the model",
    "mixed_precision": "the precision is that of fp16.enabled and bf16.enabled",
}
_OFF = ("no", "none", "fp32", "auto")


def target(path: str, value: Any, schema: Schema) -> str | None:
    """The dotted key that the release reads instead of `path`, None where there is none or nothing is asked for."""
    key = _NAMES.get(path)
    parallel = key is not None and key.startswith("tensor_parallel.")
    if key is None or (parallel and not _asks(value)):
        return None
    return key if schema.key(key) is not None or key.startswith("optimizer.params.") else None


def instead(path: str, value: Any) -> str | None:
    """Where what `path` asks for is switched on, if not in a ds_config; None where it asks for nothing."""
    return _NOT_IN_THE_CONFIG.get(path) if _asks(value) else None


def _asks(value: Any) -> bool:
    """A switch that is on, more than one part, or a precision: not what a run does anyway."""
    if isinstance(value, str):
        return value.lower() not in _OFF
    return value is True or (isinstance(value, (int, float)) and value > 1)
