"""What `introspect` has to be told about DeepSpeed's config, since the code that reads it does not say it by itself."""

from __future__ import annotations

from typing import Any

TYPED = {
    "zero_optimization": ("runtime.zero.config", "DeepSpeedZeroConfig"),
    "fp16": ("runtime.precision_config", "DeepSpeedFP16Config"),
    "bf16": ("runtime.precision_config", "DeepSpeedBF16Config"),
    "comms_logger": ("comm.config", "CommsLoggerConfig"),
    "tensorboard": ("monitor.config", "TensorBoardConfig"),
    "wandb": ("monitor.config", "WandbConfig"),
    "csv_monitor": ("monitor.config", "CSVConfig"),
    "comet": ("monitor.config", "CometConfig"),
    "compile": ("runtime.compiler", "CompileConfig"),
    "hybrid_engine": ("runtime.config", "HybridEngineConfig"),
    "timers.throughput": ("utils.config", "DeepSpeedThroughputTimerConfig"),
    "tensor_parallel": ("runtime.tensor_parallel.config", "TPTrainingConfig"),
    "weight_quantization": ("inference.config", "WeightQuantConfig"),
    "nebula": ("nebula.config", "DeepSpeedNebulaConfig"),
}
MOVED = {"compile": [("compile.config", "CompileConfig"), ("runtime.compiler", "CompileConfig")]}

PLAIN: dict[str, dict[str, Any]] = {
    "fp16": {"enabled": True, "loss_scale_window": 1000},
    "bf16": {"enabled": True},
    "activation_checkpointing": {},
    "flops_profiler": {},
    "aio": {},
    "data_types": {},
    "checkpoint": {},
    "checkpoint.parallel_write": {},
    "checkpoint.writer": {},
    "torch_autocast": {"enabled": True},
    "expert_parallel": {"enabled": False},
}
OPEN = (
    "data_efficiency",
    "curriculum_learning",
    "progressive_layer_drop",
    "eigenvalue",
    "quantize_training",
    "compression_training",
    "sparse_attention",
    "amp",
    "autotuning",
    "elasticity",
    "nebula",
    "graph_harvesting",
    "datastates_ckpt",
    "optimizer.params",
    "scheduler.params",
    "timers",
    "weight_quantization",
    "pipeline",
)
"""Sections whose keys are not checked: free by nature, or of more shapes than one table holds."""

READ_ELSEWHERE: dict[str, tuple[str, dict[str, Any]]] = {
    "data_parallel_size": ("__init__.py", {"kind": "int"}),
    "sequence_parallel_size": ("__init__.py", {"kind": "int"}),
    "vocabulary_size": ("runtime/config.py", {"kind": "int", "nullable": True}),
}
"""Top-level keys that some other place than DeepSpeedConfig's first pass reads; listed if that file names them."""

DTYPES = sorted(
    name
    for dtype in ("float16", "float32", "bfloat16")
    for name in (dtype, f"torch.{dtype}", {"float16": "fp16", "float32": "fp32", "bfloat16": "bf16"}[dtype])
)
"""The spellings of `inference.config.DtypeEnum` for the types that autocast takes."""
KINDS: dict[str, dict[str, Any]] = {
    "train_batch_size": {"kind": "int"},
    "train_micro_batch_size_per_gpu": {"kind": "int"},
    "gradient_accumulation_steps": {"kind": "int"},
    "steps_per_print": {"kind": "float"},
    "gradient_clipping": {"kind": "float"},
    "gradient_predivide_factor": {"kind": "float"},
    "communication_data_type": {"kind": "str", "choices": ["fp16", "bf16", "fp32"]},
    "seq_parallel_comm_data_type": {"kind": "str", "choices": ["fp16", "bf16", "fp32"]},
    "seq_parallel_communication_data_type": {"kind": "str", "choices": ["fp16", "bf16", "fp32"]},
    "gradient_allreduce_op": {"kind": "str", "choices": ["mean", "sum"]},
    "log_level": {"kind": "str", "choices": ["critical", "debug", "error", "info", "warning"]},
    "activation_checkpointing.number_checkpoints": {"kind": "int"},
    "flops_profiler.output_file": {"kind": "str"},
    "flops_profiler.recompute_fwd_factor": {"kind": "float"},
    "flops_profiler.detailed": {"kind": "bool"},
    "data_types.grad_accum_dtype": {"kind": "str", "choices": ["fp16", "bf16", "fp32"]},
    "data_types.param_dtype": {"kind": "str"},
    "data_types.buffer_dtype": {"kind": "str"},
    "data_types.keep_in_fp32_modules": {"kind": "any"},
    "checkpoint.tag_validation": {"kind": "str", "choices": ["ignore", "warn", "fail"]},
    "checkpoint.checkpoint_serialization": {"kind": "bool"},
    "fp16.loss_scale": {"kind": "float"},
    "torch_autocast.dtype": {"kind": "str", "choices": DTYPES},
    "checkpoint.writer": {"kind": "section", "nullable": True},
    "checkpoint.writer.type": {"kind": "str", "choices": ["mock", "python", "fast"]},
    "checkpoint.writer.data_parallel": {"kind": "str", "choices": ["replica", "socket", "machine"]},
    "torch_autocast.lower_precision_safe_modules": {"kind": "list"},
    "optimizer": {"kind": "section"},
    "scheduler": {"kind": "section"},
}
"""What Python does with the value of a plain key whose default does not tell."""


CHECKED_LATER: dict[str, dict[str, Any]] = {
    "zero_optimization.zenflow.select_strategy": {"choices": ["auto", "step", "epoch"]},
}
"""What a validator of a typed section demands beyond the type."""
