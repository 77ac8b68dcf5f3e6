"""What a script may ask an engine about its settings: the names of DeepSpeed's engine, answered from `Settings`.

ZeRO questions are answered with "no": the plain engine replicates everything. Runs in rank processes only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from dsdoctor.runs.plain.settings import Settings


class Queries:
    """Mixed into the engine, which sets `settings`, `config` and `dp_world_size`."""

    settings: Settings
    config: dict[str, Any]
    dp_world_size: int

    def train_batch_size(self) -> int:
        return self.settings.train_batch

    def train_micro_batch_size_per_gpu(self) -> int:
        return self.settings.micro_batch

    def gradient_accumulation_steps(self) -> int:
        return self.settings.accumulation

    def get_batch_info(self) -> tuple[Callable[[], int], Callable[[], int], Callable[[], int]]:
        return self.train_batch_size, self.train_micro_batch_size_per_gpu, self.gradient_accumulation_steps

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the global batch by changing the number of accumulation steps.

        Raises:
            ValueError: not a multiple of micro-batch times ranks.
        """
        share = self.settings.micro_batch * self.dp_world_size
        if train_batch_size % share:
            raise ValueError(f"train batch size {train_batch_size} is not a multiple of {share} (micro-batch * ranks)")
        self.settings = replace(self.settings, train_batch=train_batch_size, accumulation=train_batch_size // share)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the micro-batch, and the global batch with it."""
        train = micro_batch_size * self.settings.accumulation * self.dp_world_size
        self.settings = replace(self.settings, micro_batch=micro_batch_size, train_batch=train)

    def managed_gradient_accumulation(self) -> bool:
        return self.settings.managed_accumulation

    def gradient_clipping(self) -> float:
        return self.settings.clipping

    def steps_per_print(self) -> int | None:
        value = self.config.get("steps_per_print")
        return value if isinstance(value, int) else None

    def fp16_enabled(self) -> bool:
        return self.settings.precision == "fp16"

    def bfloat16_enabled(self) -> bool:
        return self.settings.precision == "bf16"

    def fp16_auto_cast(self) -> bool:
        return self.settings.cast_inputs

    def torch_autocast_enabled(self) -> bool:
        return self.settings.autocast is not None

    def torch_autocast_dtype(self) -> torch.dtype | None:
        return self.settings.autocast

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        model = self.settings.model_dtype or torch.float32
        return model, self.settings.accumulate_in or model

    def dynamic_loss_scale(self) -> bool:
        return self.fp16_enabled() and self.settings.loss_scale.static is None

    def initial_dynamic_scale(self) -> float:
        return self.settings.loss_scale.initial

    def loss_scale(self) -> float:
        """The configured static scale, 0 where it is dynamic. The scale of the moment is `optimizer.cur_scale`."""
        return self.settings.loss_scale.static or 0.0

    def optimizer_name(self) -> str | None:
        return self.settings.optimizer

    def optimizer_params(self) -> Mapping[str, Any]:
        return self.settings.optimizer_params

    def scheduler_name(self) -> str | None:
        return self.settings.scheduler

    def scheduler_params(self) -> Mapping[str, Any]:
        return self.settings.scheduler_params

    def dataloader_drop_last(self) -> bool:
        return self.settings.drop_last

    def zero_optimization(self) -> bool:
        return False

    def zero_optimization_stage(self) -> int:
        return 0

    def zero_optimization_partition_gradients(self) -> bool:
        return False

    def zero_optimization_partition_weights(self) -> bool:
        return False

    def zero_offload_optimizer(self) -> None:
        return None

    def zero_offload_param(self) -> None:
        return None

    def zero_cpu_offload(self) -> bool:
        return False

    def zero_use_cpu_optimizer(self) -> bool:
        return False

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """True: the whole weights are there on every rank."""
        return True

    def wall_clock_breakdown(self) -> bool:
        return False

    def get_data_parallel_world_size(self) -> int:
        return self.dp_world_size
