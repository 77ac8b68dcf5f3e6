"""DeepSpeed's part played by plain PyTorch, so that a script runs "without DeepSpeed", unchanged.

`initialize` stands in for `deepspeed.initialize`. Everything here runs in rank processes only, and imports torch.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

from dsdoctor.runs.plain.engine import PlainEngine
from dsdoctor.runs.plain.errors import MemberNotPlayed, NotPlayed, UnsupportedByPlain

__all__ = ["MemberNotPlayed", "NotPlayed", "PlainEngine", "UnsupportedByPlain", "initialize"]


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int | None = None,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Any = None,
    config: dict[str, Any] | None = None,
    mesh_param: Any = None,
    config_params: dict[str, Any] | None = None,
    zero_stage: int = 1,
    **ignored: Any,
) -> tuple[PlainEngine, Optimizer | None, Any, Any]:
    """Same arguments, order of results and meaning as `deepspeed.initialize`; `config` is a dict here.

    `zero_stage` is the stage that DeepSpeed would run at: without ZeRO its 16-bit optimizers begin otherwise.

    Returns:
        engine, optimizer (None without one), data loader (None without `training_data`), schedule.

    Raises:
        NotPlayed: the model or config needs something that only DeepSpeed has.
        AssertionError: no model, or no config.
    """
    assert model is not None, "initialize needs a model"
    config = config if config is not None else config_params
    assert isinstance(config, dict), "initialize needs the ds_config as a dict"
    engine = PlainEngine(
        model,
        config,
        args=args,
        optimizer=optimizer,
        model_parameters=model_parameters,
        training_data=training_data,
        lr_scheduler=lr_scheduler,
        mpu=mpu,
        collate_fn=collate_fn,
        zero_stage=zero_stage,
    )
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler
