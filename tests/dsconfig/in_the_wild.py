"""ds_configs in the shapes that people publish: examples of frameworks, fine-tuning scripts, papers, course work.

Collected from public repositories and rewritten: values that name somebody's paths or projects are replaced, and what
differed in nothing that matters was merged. `wrong` are the ids that have to be found at severity error or warning,
because DeepSpeed itself refuses the config, or does something else than it says; everything else has to stay silent.
"""

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


CONFIGS = (
    # Hugging Face's Trainer and what is built on it
    hf("sft zero0", HF, AUTO16, zero(0, BUCKETS, overlap_comm=False, round_robin_gradients=True)),
    hf(
        "sft zero2",
        HF,
        AUTO16,
        zero(2, BUCKETS, overlap_comm=False, round_robin_gradients=True),
        {"zero_allow_untested_optimizer": True},
    ),
    hf("sft zero3", HF, AUTO16, zero(3, AUTO_BUCKETS, LIVE, GATHER), {"zero_allow_untested_optimizer": True}),
    hf("sft zero3 offload", HF, AUTO16, zero(3, BOTH, AUTO_BUCKETS, LIVE, GATHER, overlap_comm=False)),
    hf(
        "with sections for a monitor of its own",
        HF,
        AUTO16,
        zero(2, BUCKETS),
        {"comms_config": {"verbose": False}, "monitor_config": {"enabled": True, "csv_monitor": {"enabled": False}}},
    ),
    hf(
        "nothing kept alive",
        HF,
        {"fp16": {"enabled": "auto", "auto_cast": False, "consecutive_hysteresis": False} | SCALE},
        zero(
            3,
            BOTH,
            AUTO_BUCKETS,
            GATHER,
            sub_group_size=0,
            stage3_max_live_parameters=0,
            stage3_max_reuse_distance=0,
        ),
    ),
    hf(
        "max_live_parameters without its prefix",
        HF,
        BF16,
        zero(
            3,
            BOTH,
            AUTO_BUCKETS,
            sub_group_size=0,
            max_live_parameters=0,
            max_reuse_distance=0,
            gather_16bit_weights_on_model_save=True,
        ),
        {"zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True},
    ),
    hf(
        "the old name of gathering",
        BATCH,
        {"fp16": FP16},
        zero(
            3,
            BOTH,
            LIVE,
            overlap_comm=True,
            sub_group_size=1e14,
            reduce_bucket_size=0,
            stage3_prefetch_bucket_size=0,
            stage3_param_persistence_threshold=0,
            stage3_gather_fp16_weights_on_model_save=True,
        ),
        {"optimizer": {"type": "AdamW", "params": {"lr": 3e-5, "betas": [0.8, 0.999]}}, "scheduler": WARM_1000},
        QUIET,
        wrong=("config/deprecated", "config/wrong-type"),
    ),
    hf("test zero2", HF, AUTO16, zero(2, OFF, BUCKETS), {"optimizer": ADAMW, "scheduler": WARM}, QUIET),
    hf("test zero3", HF, AUTO16, zero(3, BOTH, AUTO_BUCKETS, LIVE, GATHER), {"optimizer": ADAMW, "scheduler": WARM}),
    hf(
        "torch's adam offloaded",
        HF,
        {"fp16": {"enabled": "auto"} | SCALE, "optimizer": {"type": "AdamW", "params": ADAMW["params"]}},
        zero(2, OFF, BUCKETS),
        {"scheduler": WARM},
    ),
    hf("qlora", HF, zero(2, BUCKETS), QUIET),
    hf("image and text zero3", BATCH, AUTO16, zero(3, AUTO_BUCKETS, LIVE, GATHER)),
    hf("no prefetch", BATCH, AUTO16, zero(3, AUTO_BUCKETS, LIVE, GATHER, stage3_prefetch_bucket_size=0)),
    hf(
        "node local checkpoints",
        BATCH,
        AUTO16,
        zero(3, AUTO_BUCKETS, LIVE, GATHER),
        {"checkpoint": {"use_node_local_storage": True}},
    ),
    hf(
        "one size for all",
        BATCH,
        AUTO16,
        zero(
            3,
            GATHER,
            sub_group_size=536870912,
            reduce_bucket_size=536870912,
            stage3_prefetch_bucket_size=536870912,
            stage3_param_persistence_threshold=524288,
            stage3_max_live_parameters=536870912,
            stage3_max_reuse_distance=536870912,
        ),
    ),
    hf("linear attention", HF, BF16, zero(2, BUCKETS, overlap_comm=False), {"zero_allow_untested_optimizer": True}),
    hf(
        "profiled",
        HF,
        {"bf16": {"enabled": "auto"}},
        zero(2, OFF, BUCKETS),
        {"flops_profiler": FLOPS_TO_STDOUT},
        QUIET,
    ),
    hf(
        "profiled into a file",
        HF,
        AUTO16,
        zero(2, OFF, BUCKETS),
        {"flops_profiler": FLOPS | {"profile_step": 9, "output_file": "profile.txt"}},
        {"scheduler": DECAY | {"params": DECAY["params"] | {"last_batch_iteration": -1}}, "optimizer": ADAMW},
    ),
    hf(
        "round robin",
        BATCH,
        {"fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}, "optimizer": ADAMW},
        zero(2, OFF, overlap_comm=True, sub_group_size=1e9, reduce_bucket_size="auto", round_robin_gradients=True),
        {"train_batch_size": 4, "scheduler": DECAY | {"params": DECAY["params"] | {"warmup_type": "linear"}}},
    ),
    hf(
        "hierarchical partition with trackers switched off",
        HF,
        BF16,
        zero(
            3,
            AUTO_BUCKETS,
            LIVE,
            reduce_scatter=True,
            zero_hpz_partition_size=8,
            stage3_gather_16bit_weights_on_model_save=False,
            offload_optimizer={"device": "none"},
            offload_param={"device": "none"},
        ),
        {"tensorboard": {"enabled": False, "output_path": "tb", "job_name": "run"}, "steps_per_print": 2000000},
    ),
    hf(
        "zero++",
        BATCH,
        {"bf16": {"enabled": "auto"}},
        zero(3, zero_quantized_weights=True, zero_hpz_partition_size=8, zero_quantized_gradients=True),
        {"zero_optimization_comment": "see the tutorial"},
    ),
    hf(
        "compile with a key that is gone",
        HF,
        AUTO16,
        zero(2, overlap_comm=True),
        {"compile": {"disable": False, "backend": "inductor"}},
        wrong=("config/unknown-key",),
    ),
    hf(
        "a start scale of 2^32",
        BATCH,
        {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto", "auto_cast": False} | SCALE},
        {"fp16": {"enabled": "auto"} | SCALE | {"initial_scale_power": 32}},
        zero(1, overlap_comm=True),
        {"optimizer": ADAMW},
    ),
    hf(
        "stage 3 keys at stage 2",
        HF,
        {"fp16": {"enabled": "auto"} | SCALE, "optimizer": ADAMW, "scheduler": WARM},
        zero(2, overlap_comm=True, sub_group_size=1e9, reduce_bucket_size="auto"),
        QUIET,
    ),
    hf("gathering at stage 2", HF, {"fp16": {"enabled": "auto"} | SCALE}, zero(2, BUCKETS, GATHER)),
    hf(
        "offload_param at stage 2",
        HF,
        {"fp16": FP16, "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": 0.01}}},
        zero(2, BOTH, AUTO_BUCKETS, LIVE, stage3_gather_fp16_weights_on_model_save=True),
        wrong=("config/ineffective", "config/deprecated"),
    ),
    hf(
        "offload_param at stage 2, no precision",
        BATCH,
        {"fp16": {"enabled": False}, "bf16": {"enabled": False}, "gradient_clipping": 1.0},
        zero(2, offload_param={"device": "cpu"}, offload_optimizer={"device": "cpu"}, allgather_bucket_size=5e8),
        wrong=("config/ineffective",),
    ),
    hf(
        "the old name of bf16",
        HF,
        {"bfloat16": {"enabled": "auto"}, "fp16": {"enabled": "auto"} | SCALE},
        zero(2, OFF, BUCKETS),
        {"optimizer": ADAMW, "scheduler": WARM, "steps_per_print": 1e5},
        wrong=("config/deprecated",),
    ),
    hf(
        "a loss scale for bf16",
        BATCH,
        {"fp16": {"enabled": False} | SCALE, "bf16": FP16, "gradient_clipping": 1},
        zero(2, BUCKETS, reduce_bucket_size="auto"),
        {"optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True}}},
        {"scheduler": DECAY},
        wrong=("config/unknown-key",),
    ),
    hf(
        "a static loss scale of 1",
        {"train_micro_batch_size_per_gpu": "auto", "fp16": {"enabled": True, "loss_scale": 1.0}},
        zero(2, offload_optimizer={"device": "cpu"}),
        {"optimizer": {"type": "Adam", "params": {"lr": "auto", "weight_decay": "auto"}}},
        CLIP,
        wrong=("loss-scale/static",),
    ),
    hf(
        "the micro batch without train_",
        zero(3, BOTH, AUTO_BUCKETS, LIVE, GATHER),
        {"train_batch_size": "auto", "micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": "auto"},
        wrong=("config/unknown-key",),
    ),
    hf(
        "a long context",
        BF16,
        {"train_batch_size": 32768, "train_micro_batch_size_per_gpu": 4096, "gradient_accumulation_steps": "auto"},
        {"fp16": {"enabled": False}, "gradient_clipping": 1.0, "activation_checkpointing": ACTIVATIONS},
        zero(2, BUCKETS, offload_optimizer={"device": "none"}, round_robin_gradients=True),
        {"optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": [0.9, 0.999], "weight_decay": "auto"}}},
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_num_steps": "auto"}}},
    ),
    hf(
        "compile section with its defaults",
        BF16,
        zero(3, sub_group_size=100000000),
        {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": 1},
        {"compile": {"deepcompile": False, "offload_activation": False, "double_buffer": True, "debug_log": False}},
        CLIP,
        QUIET,
    ),
    # Accelerate
    hf("accelerate zero1", {**BATCH, "gradient_accumulation_steps": 1}, BF16, zero(1), framework="accelerate"),
    hf("accelerate zero2", BATCH, CLIP, BF16, zero(2, BUCKETS), framework="accelerate"),
    hf(
        "accelerate zero3",
        {**BATCH, "gradient_accumulation_steps": 4, "gradient_clipping": 1.0},
        BF16,
        zero(3, BOTH, AUTO_BUCKETS, GATHER),
        framework="accelerate",
        ranks=4,
    ),
    # deepspeed.initialize
    plain("image classifier", {"train_batch_size": 16, "optimizer": ADAM, "scheduler": WARM_1000}, QUIET, ranks=4),
    plain("video classifier", {"train_batch_size": 16, "optimizer": ADAM, "wall_clock_breakdown": False}),
    plain(
        "ddp course", {"train_batch_size": 400, "optimizer": ADAM, "gradient_clipping": 1.0}, {"scheduler": WARM_1000}
    ),
    plain("graph network", {"train_batch_size": 1500, "optimizer": ADAM, "scheduler": WARM_1000}, ranks=3),
    plain("nothing but a batch", {"train_batch_size": 32, "fp16": {"enabled": False}}, zero(0)),
    plain(
        "translation", {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 8, "optimizer": ADAM}, zero(2), ranks=1
    ),
    plain("graph alignment", {"train_micro_batch_size_per_gpu": 512}, zero(1, BUCKETS), {"steps_per_print": 100}),
    plain("bf16 without zero", {"train_batch_size": 128, "train_micro_batch_size_per_gpu": 1}, BF16, zero(0)),
    plain("a small language model", BF16, {"train_micro_batch_size_per_gpu": 16, "gradient_clipping": 1.0}, zero(0)),
    plain(
        "spiking network",
        BF16,
        {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 100},
        zero(2, BUCKETS),
    ),
    plain("two nodes", {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 1}, {"fp16": FP16}, zero(3), ranks=4),
    plain(
        "megatron zero3",
        {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 16, "gradient_accumulation_steps": 1},
        zero(3, LIVE, offload_optimizer=PINNED | {"buffer_count": 4, "pipeline_read": False}, sub_group_size=1e9),
        {"fp16": FP16 | {"initial_scale_power": 15}, "zero_allow_untested_optimizer": True, "aio": AIO},
        {"wall_clock_breakdown": True, "steps_per_print": 1},
        ranks=1,
    ),
    plain(
        "megatron zero2 with an old spelling",
        {"train_batch_size": 96, "gradient_accumulation_steps": 1, "optimizer": ADAM},
        {"communication_data_type": "bfp16", "bfloat16": {"enabled": True, "loss_scale": 1.0}},
        zero(2),
        {"activation_checkpointing": {"partition_activations": True}, "flops_profiler": FLOPS_TO_STDOUT},
        wrong=("config/wrong-type", "config/unknown-key", "config/deprecated"),
    ),
    plain(
        "cifar with fp16 masters",
        {"train_batch_size": 16, "optimizer": ADAM, "scheduler": WARM_1000, "prescale_gradients": False},
        {"fp16": FP16 | {"fp16_master_weights_and_grads": True, "initial_scale_power": 15}},
        zero(2, BUCKETS, cpu_offload=True),
        wrong=("config/deprecated",),
    ),
    plain(
        "infinity with a static scale and a typo",
        {"train_micro_batch_size_per_gpu": 4, "fp16": FP16 | {"loss_scale": 1024}, "aio": AIO},
        zero(
            3,
            stage3_param_persitance_threshold=1e5,
            offload_optimizer={"device": "nvme", "nvme_path": "/nvme", "buffer_count": 4},
            offload_param={"device": "nvme", "nvme_path": "/nvme", "max_in_cpu": 1},
        ),
        wrong=("config/unknown-key", "loss-scale/static"),
    ),
    plain(
        "infinity",
        {"train_micro_batch_size_per_gpu": 4, "fp16": FP16, "aio": AIO, "wall_clock_breakdown": True},
        zero(
            3,
            LIVE,
            offload_optimizer={"device": "nvme", "nvme_path": "/nvme", "buffer_count": 4, "pin_memory": True},
            offload_param={"device": "nvme", "nvme_path": "/nvme", "max_in_cpu": 1, "pin_memory": True},
        ),
    ),
    plain(
        "one cycle",
        {"train_batch_size": 512, "train_micro_batch_size_per_gpu": 32, "optimizer": ADAM},
        {
            "scheduler": {
                "type": "OneCycle",
                "params": {
                    "cycle_min_lr": 0.004,
                    "cycle_max_lr": 0.015,
                    "cycle_first_step_size": 1000,
                    "cycle_second_step_size": 100,
                    "cycle_first_stair_count": 100,
                    "cycle_second_stair_count": 100,
                    "decay_step_size": 1000,
                    "decay_lr_rate": 0.01,
                },
            }
        },
    ),
    plain(
        "protein folding, for an older release",
        {"train_micro_batch_size_per_gpu": 1, "fp16": {"enabled": False, "min_loss_scale": 1}},
        {"amp": {"enabled": False, "opt_level": "O2"}, "zero_force_ds_cpu_optimizer": False, "gradient_clipping": 0.1},
        BF16,
        zero(2, offload_optimizer={"device": "cpu"}),
        {"activation_checkpointing": ACTIVATIONS},
        release="0.16.4",
    ),
    plain(
        "protein folding, today",
        {"train_micro_batch_size_per_gpu": 1, "amp": {"enabled": False, "opt_level": "O2"}},
        {"bfloat16": {"enabled": True}},
        zero(2, offload_optimizer={"device": "cpu"}),
        {"zero_force_ds_cpu_optimizer": False},
        wrong=("config/removed", "config/deprecated"),
    ),
    plain(
        "pipeline of decoder layers",
        {"train_micro_batch_size_per_gpu": 16, "train_batch_size": 128, "gradient_clipping": 1.0},
        {"bf16": {"enabled": False}, "fp16": FP16 | {"initial_scale_power": 12}, "optimizer": ADAM},
        {"scheduler": {"type": "WarmupDecayLR", "params": WARM_1000["params"] | {"total_num_steps": 1000}}},
        {"activation_checkpointing": ACTIVATIONS | {"partition_activations": False}},
        wrong=("version/known-defect",),
    ),
    plain(
        "lion with a parameter of another class",
        {"train_micro_batch_size_per_gpu": 2, "zero_allow_untested_optimizer": True},
        {"optimizer": {"type": "Lion", "params": {"lr": 2e-6, "betas": [0.9, 0.999], "use_triton": True}}},
        {"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 200, "total_num_steps": 1000}}},
        zero(1, BOTH),
        wrong=("config/unknown-key", "config/ineffective"),
    ),
    plain(
        "benchmark of a language model",
        {"fp16": FP16 | {"initial_scale_power": 8}, "optimizer": {"type": "Adam"}},
        zero(2, BUCKETS),
        {"gradient_accumulation_steps": 1, "train_batch_size": 32, "train_micro_batch_size_per_gpu": 4},
        {"zero_allow_untested_optimizer": True},
    ),
    plain(
        "with a link to the documentation",
        {"_read_the_docs": "https://example.org/config", "train_micro_batch_size_per_gpu": 256},
        {"gradient_accumulation_steps": 1, "gradient_clipping": 5.0, "comms_logger": COMMS, "optimizer": ADAM},
        {"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 1e-4, "cycle_max_lr": 4e-3}}},
        zero(1, BUCKETS),
        {"tensorboard": {"enabled": False, "output_path": "logs"}, "checkpoint": {"use_node_local_storage": True}},
    ),
    plain(
        "upsampling in fp16 without zero",
        {"train_micro_batch_size_per_gpu": 2048, "gradient_accumulation_steps": 2, "fp16": FP16, "optimizer": ADAM},
        zero(0, BUCKETS),
        wrong=("version/known-defect",),
    ),
    plain(
        "tutorial",
        {"train_batch_size": 4480, "train_micro_batch_size_per_gpu": 560, "gradient_accumulation_steps": 1},
        {"scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 250, "warmup_num_steps": 10}}},
        {"optimizer": {"type": "AdamW", "params": {"lr": 0.002, "betas": [0.9, 0.999], "weight_decay": 0.05}}},
        BF16,
        zero(2, OFF, BUCKETS),
    ),
    plain(
        "medical images",
        {"train_batch_size": 4, "gradient_clipping": 1.0, "steps_per_print": 2000},
        {"fp16": FP16 | {"auto_cast": False, "consecutive_hysteresis": False}},
        zero(2, BUCKETS, cpu_offload=False),
        {"optimizer": {"type": "Adam", "params": ADAM["params"] | {"adam_w_mode": True}}},
        {
            "scheduler": {
                "type": "WarmupCosineLR",
                "params": {
                    "total_num_steps": 428800,
                    "warmup_num_steps": 10720,
                    "warmup_min_ratio": 0,
                    "cos_min_ratio": 0.0001,
                    "last_batch_iteration": -1,
                },
            }
        },
        ranks=4,
        wrong=("config/deprecated",),
    ),
    plain(
        "recommender",
        {"train_micro_batch_size_per_gpu": 8, "prescale_gradients": False, "zero_allow_untested_optimizer": True},
        zero(3, BUCKETS, stage3_prefetch_bucket_size=5e8, stage3_param_persistence_threshold=5e8, sub_group_size=5e8),
        {"scheduler": {"type": "WarmupDecayLR", "params": WARM_1000["params"] | {"total_num_steps": 2000}}},
        {"activation_checkpointing": {"partition_activations": True, "cpu_checkpointing": True}, "optimizer": ADAM},
        BF16,
    ),
    plain(
        "a section of the script's own",
        {"train_batch_size": 120, "gradient_accumulation_steps": 2, "optimizer": ADAM, "fp16": {"enabled": False}},
        zero(2),
        {"distributed": {"num_gpus": 5, "device_ids": [3, 4, 5, 6, 7]}},
        ranks=5,
    ),
    plain(
        "mixture of experts",
        {"train_batch_size": 8, "gradient_accumulation_steps": 1, "optimizer": ADAM, "scheduler": WARM_1000},
        zero(2, BUCKETS),
        {"fp16": {"enabled": True}},
    ),
    plain(
        "self-supervised",
        {"train_micro_batch_size_per_gpu": 1, "optimizer": ADAM, "scheduler": WARM_1000},
        {"activation_checkpointing": ACTIVATIONS | {"profile": True}, "fp16": FP16 | {"auto_cast": False}},
        zero(3, BOTH, overlap_comm=True),
    ),
    plain(
        "warm-up of no steps",
        zero(2, OFF, BUCKETS),
        {"train_micro_batch_size_per_gpu": 1},
        {"optimizer": {"type": "Adam", "params": {"adam_w_mode": True, "lr": 3e-5}}},
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 3e-5, "warmup_num_steps": 0}}},
        wrong=("config/conflict",),
    ),
    plain(
        "auto that nobody resolves",
        zero(1, OFF),
        AUTO16,
        {"train_micro_batch_size_per_gpu": 8, "gradient_clipping": 1.0},
        wrong=("config/auto-unresolved",),
    ),
    plain(
        "a batch for another number of ranks",
        {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1},
        {"fp16": {"enabled": True}, "optimizer": ADAM},
        zero(1),
        wrong=("config/batch-size",),
    ),
    plain("no micro batch", {"gradient_accumulation_steps": 1}, zero(0), wrong=("config/batch-size",)),
    plain(
        "partition_activations contiguous",
        {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4},
        zero(
            3,
            offload_optimizer=PINNED | {"buffer_count": 4},
            offload_param=PINNED | {"buffer_count": 5, "buffer_size": 1e8},
        ),
        {"fp16": FP16 | {"loss_scale_window": 500}},
        {"activation_checkpointing": ACTIVATIONS | {"contiguous_memory_optimization": True, "number_checkpoints": 4}},
    ),
    plain(
        "inference server's training section",
        {"fp16": {"enabled": True}, "train_micro_batch_size_per_gpu": 1, "enable_cuda_graph": False},
        zero(3, offload_optimizer={"device": "none", "pin_memory": False}),
        {"tensor_parallel": {"enabled": False}, "gradient_clipping": 1.0},
        wrong=("config/unknown-key",),
    ),
    plain(
        "lamb in fp16, for an older release",
        {"train_batch_size": 65536, "train_micro_batch_size_per_gpu": 64, "prescale_gradients": False},
        {"optimizer": {"type": "Lamb", "params": {"lr": 11e-3, "bias_correction": False, "max_coeff": 0.3}}},
        {"fp16": {"enabled": True, "loss_scale": 0}, "gradient_clipping": 1.0},
        {"sparse_attention": {"mode": "fixed", "block": 16, "num_local_blocks": 4}},
        ranks=64,
        release="0.16.4",
    ),
    plain(
        "1-bit lamb, for an older release",
        {"train_batch_size": 65536, "train_micro_batch_size_per_gpu": 64, "fp16": FP16, "gradient_clipping": 1.0},
        {"optimizer": {"type": "OneBitLamb", "params": {"lr": 11e-3, "freeze_step": 1000, "coeff_beta": 0.9}}},
        ranks=64,
        release="0.16.4",
    ),
    plain(
        "compressed bert, for an older release",
        {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 32, "fp16": {"enabled": True}},
        {"prescale_gradients": True, "gradient_clipping": 1.0},
        zero(0),
        {
            "compression_training": {
                "layer_reduction": {"enabled": False, "keep_number_layer": 5, "teacher_layer": [2, 4, 6, 8, 10]},
                "weight_quantization": {
                    "shared_parameters": {"enabled": True, "quantize_groups": 64, "quantization_type": "symmetric"},
                    "different_groups": {
                        "wq1": {
                            "params": {"start_bits": 8, "target_bits": 8, "quantization_period": 0},
                            "modules": ["attention.self"],
                        }
                    },
                },
            }
        },
        ranks=1,
        release="0.16.4",
    ),
    plain(
        "elastic, for an older release",
        {"optimizer": ADAM, "scheduler": WARM_1000, "bf16": {"enabled": True}},
        {
            "elasticity": {
                "enabled": True,
                "max_train_batch_size": 200,
                "micro_batch_sizes": [16, 32],
                "min_gpus": 1,
                "max_gpus": 2,
                "min_time": 0,
                "version": 0.1,
                "ignore_non_elastic_batch_info": True,
            },
            "train_batch_size": 16,
        },
        zero(1),
        ranks=2,
        release="0.16.4",
    ),
    plain(
        "curriculum and token dropping",
        {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 8, "dataloader_drop_last": True},
        {"fp16": FP16 | {"loss_scale_window": 500, "initial_scale_power": 11}, "wall_clock_breakdown": False},
        zero(1, elastic_checkpoint=True),
        {
            "data_efficiency": {
                "enabled": True,
                "seed": 1234,
                "data_sampling": {"enabled": True, "num_workers": 0, "curriculum_learning": {"enabled": False}},
                "data_routing": {
                    "enabled": True,
                    "random_ltd": {
                        "enabled": True,
                        "total_layer_num": 24,
                        "random_ltd_layer_num": 22,
                        "random_ltd_layer_id": list(range(1, 23)),
                        "model_mask_name": "attention_mask",
                        "model_type": "decoder",
                        "hidden_state_order": "seq_batch_dim",
                        "random_ltd_schedule": {
                            "min_value": 128,
                            "max_value": 2048,
                            "schedule_type": "fixed_linear",
                            "schedule_config": {"require_steps": 200000, "seq_per_step": 16},
                        },
                    },
                },
            }
        },
    ),
    plain(
        "autotuned",
        {"train_micro_batch_size_per_gpu": "auto", "fp16": {"enabled": True}},
        zero(1),
        {"autotuning": {"enabled": True, "fast": True, "arg_mappings": {"train_micro_batch_size_per_gpu": "--bs"}}},
    ),
    plain(
        "tensor parallel",
        {"train_micro_batch_size_per_gpu": 1, "optimizer": ADAM, "tensor_parallel": {"autotp_size": 4}},
        BF16,
        zero(2),
        release="0.17.5",
    ),
    plain(
        "tensor parallel, the batch counted over all ranks",
        BF16,
        {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "tensor_parallel": {"autotp_size": 2}},
        zero(1),
        ranks=4,
    ),
    plain(
        "sequence parallel",
        BF16,
        {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 2, "sequence_parallel_size": 2},
        zero(3),
        ranks=4,
    ),
    plain(
        "Adam of torch, no zero",
        BF16,
        {"train_batch_size": 524288, "train_micro_batch_size_per_gpu": 2048, "gradient_accumulation_steps": 64},
        {"optimizer": {"type": "Adam", "params": {"lr": 0.02, "torch_adam": True}}, "gradient_clipping": 1.0},
        zero(0, overlap_comm=False, contiguous_gradients=True),
        ranks=4,
    ),
    plain(
        "the scheduler under another name",
        {"train_batch_size": 8, "optimizer": ADAM, "lr_scheduler": WARM_1000},
        zero(3, BOTH, LIVE, GATHER),
        BF16,
        wrong=("config/unknown-key",),
    ),
)
