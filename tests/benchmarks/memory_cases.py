"""The cases of the memory benchmark: ds_configs, models and batches."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

GPT2 = {
    "model_type": "gpt2",
    "attn_pdrop": 0.0,
    "n_embd": 192,
    "n_layer": 4,
    "n_head": 4,
    "vocab_size": 2048,
    "n_positions": 256,
}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 512,
    "vocab_size": 2048,
}
MODELS: dict[str, dict[str, Any]] = {
    "mlp": {"kind": "mlp", "hidden": 384, "layers": 8},
    "gpt2": {"kind": "gpt2", "config": GPT2},
    "lora": {"kind": "lora", "config": LLAMA, "rank": 8},
    "llama": {"kind": "llama", "config": LLAMA},
    "llama-checkpointing": {"kind": "llama", "config": LLAMA, "checkpointing": True},
}
SMALL_BUCKET = 200_000


def cases(*, full: bool) -> Iterator[dict[str, Any]]:
    """Stage x precision x offload x model x bucket with hardly any activations, then switches, then activations."""
    for stage, precision, offload, model, bucket in itertools.product(
        range(4), PRECISIONS, OFFLOADS, ("mlp", "gpt2", "lora"), ("small", "default")
    ):
        reduced = bucket == "small" and model == "gpt2" and precision == "bf16"
        reduced = reduced or (bucket == "small" and model == "mlp" and precision == "fp32" and offload == "none")
        if possible(stage, offload) and (full or reduced):
            name = f"{model} stage {stage} {precision} offload {offload} bucket {bucket}"
            yield case(name, model, config(stage, precision, offload, bucket), TINY)
    for name, made in switches():
        if full or "reduced" in name:
            yield case(f"gpt2 {name}", "gpt2", made, TINY)
    for stage, precision, model in itertools.product(range(4), ("fp32", "bf16"), BATCHES):
        if full or (precision == "bf16" and stage in (0, 2)):
            name = f"{model} stage {stage} {precision} with activations"
            yield case(name, model, config(stage, precision, "none", "small"), BATCHES[model])


PRECISIONS = ("fp32", "bf16", "fp16")
OFFLOADS = ("none", "optimizer", "both")
TINY = {"rows": 1, "seq": 4}
BATCHES = {
    "mlp": {"rows": 2048},
    "gpt2": {"rows": 4, "seq": 128},
    "llama": {"rows": 4, "seq": 128},
    "llama-checkpointing": {"rows": 4, "seq": 128},
    "lora": {"rows": 4, "seq": 128},
}


def possible(stage: int, offload: str) -> bool:
    return stage == 3 or (offload == "none" or (offload == "optimizer" and stage > 0))


def case(name: str, model: str, made: dict[str, Any], batch: dict[str, int]) -> dict[str, Any]:
    return {"name": name, "model": MODELS[model], "config": made, "batch": batch}


def switches() -> Iterator[tuple[str, dict[str, Any]]]:
    """Keys that move memory, one at a time."""
    accumulate = {"data_types": {"grad_accum_dtype": "fp32"}}
    low = {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}
    for stage in (1, 2, 3):
        base = config(stage, "bf16", "none", "small")
        yield f"stage {stage} bf16 accumulated in fp32", base | accumulate
        yield f"stage {stage} bf16 with 2 micro-steps", base | {"gradient_accumulation_steps": 2}
    for stage in (2, 3):
        yield f"stage {stage} bf16 with bf16 masters and states", config(stage, "bf16", "none", "small") | low
    offloaded = config(2, "bf16", "optimizer", "small")
    yield "stage 2 bf16 offload optimizer with 2 micro-steps", offloaded | {"gradient_accumulation_steps": 2}
    for stage in (1, 2):
        base = config(stage, "bf16", "none", "small")
        yield (
            f"stage {stage} bf16 with overlap_comm",
            base | {"zero_optimization": base["zero_optimization"] | {"overlap_comm": True}},
        )
    base = config(3, "bf16", "none", "small")
    for key, value in (
        ("stage3_max_live_parameters", 400_000),
        ("stage3_max_reuse_distance", 400_000),
        ("sub_group_size", 200_000),
    ):
        yield f"stage 3 bf16 with {key} {value}", base | {"zero_optimization": base["zero_optimization"] | {key: value}}
    persistent = base["zero_optimization"] | {"stage3_param_persistence_threshold": 100_000}
    yield "stage 3 bf16 with default persistence", base | {"zero_optimization": persistent}


def config(stage: int, precision: str, offload: str, bucket: str) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage, "stage3_param_persistence_threshold": 2_000}
    if bucket == "small":
        zero |= {"reduce_bucket_size": SMALL_BUCKET, "allgather_bucket_size": SMALL_BUCKET}
        zero |= {"stage3_prefetch_bucket_size": SMALL_BUCKET}
    if offload != "none":
        zero["offload_optimizer"] = {"device": "cpu"}
    if offload == "both":
        zero["offload_param"] = {"device": "cpu"}
    made: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "zero_optimization": zero,
    }
    switch = {"enabled": True} | ({"loss_scale": 1} if precision == "fp16" else {})  # no step is skipped
    return made | ({precision: switch} if precision != "fp32" else {})
