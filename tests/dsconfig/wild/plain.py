"""Published configs for `deepspeed.initialize` with which nothing is wrong."""

from tests.dsconfig.wild.parts import (
    ACTIVATIONS,
    ADAM,
    AIO,
    BF16,
    BOTH,
    BUCKETS,
    COMMS,
    FP16,
    LIVE,
    OFF,
    PINNED,
    QUIET,
    WARM_1000,
    plain,
    zero,
)

CONFIGS = (
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
        "tutorial",
        {"train_batch_size": 4480, "train_micro_batch_size_per_gpu": 560, "gradient_accumulation_steps": 1},
        {"scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 250, "warmup_num_steps": 10}}},
        {"optimizer": {"type": "AdamW", "params": {"lr": 0.002, "betas": [0.9, 0.999], "weight_decay": 0.05}}},
        BF16,
        zero(2, OFF, BUCKETS),
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
)
