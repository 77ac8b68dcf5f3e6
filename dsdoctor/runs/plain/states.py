"""State dicts and checkpoints by the engine: what a script saves and loads, by the names of DeepSpeed's engine.

Runs in rank processes only (imports torch).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from dsdoctor.runs.plain import checkpoint

if TYPE_CHECKING:
    from dsdoctor.runs.plain.stepping import PlainOptimizer


class States:
    """Mixed into the engine, which sets what is saved: the optimizer (None without one), the schedule, the counters."""

    module: nn.Module
    optimizer: PlainOptimizer | None
    lr_scheduler: Any
    notes: list[str]
    global_rank: int
    global_steps: int
    global_samples: int
    micro_steps: int
    skipped_steps: int

    def module_state_dict(self, *args: Any, exclude_frozen_parameters: bool = False, **kwargs: Any) -> dict[str, Any]:
        """The model's state dict, under the model's own names."""
        state: dict[str, Any] = self.module.state_dict(*args, **kwargs)
        if exclude_frozen_parameters:
            for name, parameter in self.module.named_parameters():
                if not parameter.requires_grad:
                    state.pop(name, None)
        return state

    def load_module_state_dict(self, state_dict: dict[str, Any], strict: bool = True, **ignored: Any) -> None:
        """Load the model's weights, masters included."""
        self.module.load_state_dict(state_dict, strict=strict)
        if self.optimizer is not None:
            self.optimizer.refresh_fp32_params()

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any]:
        return self.module_state_dict(exclude_frozen_parameters=exclude_frozen_parameters)

    _consolidated_16bit_state_dict = _zero3_consolidated_16bit_state_dict

    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save everything that training needs to go on; `client_state` comes back from `load_checkpoint`."""
        checkpoint.save(self, save_dir, tag, client_state or {}, save_latest)
        return True

    def load_checkpoint(
        self,
        load_dir: str,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Load what `save_checkpoint` saved; returns the path and the script's own state, (None, None) if not there."""
        return checkpoint.load(
            self,
            load_dir,
            tag,
            strict=load_module_strict,
            optimizer=load_optimizer_states,
            scheduler=load_lr_scheduler_states,
            only_module=load_module_only,
        )

    def save_16bit_model(
        self, save_dir: str, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Save the model's weights alone, in the model's precision."""
        return checkpoint.save_weights(self, save_dir, save_filename)

    save_fp16_model = save_16bit_model
