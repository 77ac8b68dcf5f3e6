"""What the published configs are put together from: sections that many of them share, and how one is written down."""

from dataclasses import dataclass, field
from typing import Any

SCALE = {"loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2, "min_loss_scale": 1}
FP16 = {"enabled": True} | SCALE
AUTO16 = {"fp16": {"enabled": "auto"} | SCALE, "bf16": {"enabled": "auto"}}
BF16 = {"bf16": {"enabled": True}}
BATCH = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
CLIP = {"gradient_clipping": "auto"}
ADAMW = {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}}
ADAM = {"type": "Adam", "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}}
WARM = {"type": "WarmupLR", "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), "auto")}
WARM_1000 = {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.001, "warmup_num_steps": 1000}}
DECAY = {"type": "WarmupDecayLR", "params": WARM["params"] | {"total_num_steps": "auto"}}
PINNED = {"device": "cpu", "pin_memory": True}
OFF = {"offload_optimizer": PINNED}
BOTH = {"offload_optimizer": PINNED, "offload_param": PINNED}
BUCKETS = {
    "allgather_partitions": True,
    "allgather_bucket_size": 2e8,
    "overlap_comm": True,
    "reduce_scatter": True,
    "reduce_bucket_size": 2e8,
    "contiguous_gradients": True,
}
AUTO_BUCKETS = {
    "overlap_comm": True,
    "contiguous_gradients": True,
    "sub_group_size": 1e9,
    "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
}
LIVE = {"stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9}
GATHER = {"stage3_gather_16bit_weights_on_model_save": True}
ACTIVATIONS = {
    "partition_activations": True,
    "cpu_checkpointing": True,
    "contiguous_memory_optimization": False,
    "number_checkpoints": None,
    "synchronize_checkpoint_boundary": False,
    "profile": False,
}
FLOPS = {"enabled": True, "profile_step": 1, "module_depth": -1, "top_modules": 1, "detailed": True}
FLOPS_TO_STDOUT = FLOPS | {"output_file": None}
AIO = {"block_size": 1048576, "queue_depth": 16, "single_submit": False, "overlap_events": True}
COMMS = {"enabled": True, "verbose": False, "prof_all": False, "debug": False}
QUIET = {"steps_per_print": 2000, "wall_clock_breakdown": False}
HF = BATCH | CLIP


@dataclass(frozen=True, kw_only=True)
class Wild:
    """One config, who hands it to DeepSpeed, for how many ranks and for which release it was written."""

    name: str
    config: dict[str, Any]
    framework: str = "transformers"
    ranks: int | None = None
    release: str = "0.19.8"
    wrong: tuple[str, ...] = field(default=())


def zero(stage: int, *parts: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A zero_optimization section out of parts."""
    section: dict[str, Any] = {"stage": stage}
    for part in (*parts, more):
        section |= part
    return {"zero_optimization": section}


def hf(name: str, *parts: dict[str, Any], **more: Any) -> Wild:
    """A config for Hugging Face's Trainer, or with `framework` for Accelerate."""
    config: dict[str, Any] = {}
    for part in parts:
        config |= part
    return Wild(name=name, config=config, **more)


def plain(name: str, *parts: dict[str, Any], ranks: int | None = 8, **more: Any) -> Wild:
    """A config for `deepspeed.initialize`."""
    return hf(name, *parts, framework="deepspeed", ranks=ranks, **more)
