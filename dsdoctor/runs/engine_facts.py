"""The model and the config that a script hands to DeepSpeed, as facts.

Runs in rank processes only; torch is imported by the script before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Literal, cast

from dsdoctor.runs import run_config
from dsdoctor.runs.facts import EngineFacts, ModelFacts

Framework = Literal["deepspeed", "transformers", "accelerate", "lightning"]


def model_facts(model: Any, model_parameters: Any, optimizer: Any) -> ModelFacts:
    """Count the parameters of a model, tied ones once, partitioned ones (ZeRO-3) in full."""
    counted = {id(parameter): parameter for parameter in model.parameters()}
    dtypes: Counter[str] = Counter()
    for parameter in counted.values():
        dtypes[_dtype_name(parameter)] += _count(parameter)
    config = getattr(model, "config", None)
    return ModelFacts(
        class_name=type(model).__name__,
        parameters=sum(dtypes.values()),
        trainable=sum(_count(p) for p in counted.values() if p.requires_grad),
        largest_layer=max(_own_counts(model), default=0),
        dtypes=tuple(sorted(dtypes.items())),
        parameter_groups=_groups(model_parameters, optimizer),
        model_type=_text(getattr(config, "model_type", None)),
        trained_in=_trained_in(config),
        partitioned=any(hasattr(parameter, "ds_numel") for parameter in counted.values()),
    )


def engine_facts(config: Mapping[str, Any], *, framework: Framework, optimizer: Any, world_size: int) -> EngineFacts:
    """What follows from the config in force. `optimizer` is the one that the script passes, if it does."""
    return EngineFacts(
        framework=framework,
        config=dict(config),
        precision=cast(Literal["fp32", "fp16", "bf16"], run_config.precision(config)),
        zero_stage=run_config.zero_stage(config),
        optimizer=_optimizer_name(config, optimizer),
        gradient_accumulation_steps=run_config.accumulation_steps(config, world_size),
        dynamic_loss_scale=run_config.dynamic_loss_scale(config),
        min_loss_scale=run_config.min_loss_scale(config),
    )


def _count(parameter: Any) -> int:
    """Elements of the whole parameter; `zero.Init` leaves an empty tensor with the number in `ds_numel`."""
    return int(getattr(parameter, "ds_numel", None) or parameter.numel())


def _own_counts(model: Any) -> Iterator[int]:
    for module in model.modules():
        yield sum(_count(parameter) for parameter in module.parameters(recurse=False))


def _groups(model_parameters: Any, optimizer: Any) -> int:
    groups = getattr(optimizer, "param_groups", None)
    if groups:
        return len(groups)
    if isinstance(model_parameters, (list, tuple)) and model_parameters and isinstance(model_parameters[0], dict):
        return len(model_parameters)
    return 1


def _trained_in(config: Any) -> str | None:
    """The dtype that a Hugging Face config names; newer releases call it `dtype`."""
    for name in ("dtype", "torch_dtype"):
        value = config.get(name) if isinstance(config, dict) else getattr(config, name, None)
        if value is not None:
            return str(value).removeprefix("torch.")
    return None


def _optimizer_name(config: Mapping[str, Any], optimizer: Any) -> str | None:
    if optimizer is not None:
        return type(optimizer).__name__ if not callable(optimizer) else getattr(optimizer, "__name__", "callable")
    section = config.get("optimizer")
    return _text(section.get("type")) if isinstance(section, dict) else None


def _dtype_name(parameter: Any) -> str:
    return str(parameter.dtype).removeprefix("torch.")


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None
