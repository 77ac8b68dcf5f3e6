"""Parameters of the optimizer and the scheduler against the constructors they are passed to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dsdoctor.dsconfig.effective import Effective
from dsdoctor.dsconfig.facts import ConfigFacts
from dsdoctor.dsconfig.schema import Schema, Signature, nearest

_TAKEN_OUT = ("torch_adam", "adam_w_mode", "fp32_optimizer_states", "foreach")
"""Parameters of adam and adamw that DeepSpeed's engine uses itself before it calls the constructor."""
_PASSED_BY_ENGINE = ("adam_w_mode", "adamw_mode")
_REFUSED = "max_grad_norm"
_ELSEWHERE = {
    "learning_rate": "lr",
    "epsilon": "eps",
    "adam_epsilon": "eps",
    "wd": "weight_decay",
    "num_warmup_steps": "warmup_num_steps",
    "num_training_steps": "total_num_steps",
    "total_steps": "total_num_steps",
    "max_lr": "warmup_max_lr",
    "min_lr": "warmup_min_lr",
}
"""What Transformers, Keras and torch's own schedules call them."""


@dataclass(frozen=True, kw_only=True)
class UnknownParam:
    """A parameter that its class does not take; `meant` is the one that it does, by another name or nearly this one.

    `takes` are all that it takes.
    """

    path: str
    value: Any
    owner: str
    meant: str | None
    takes: tuple[str, ...]


def unknown_params(config: ConfigFacts) -> Iterator[UnknownParam]:
    """Parameters in the config that raise in the constructor of the optimizer or the scheduler."""
    effective = Effective.of(config)
    for section, signature in (("optimizer", optimizer_class(effective)), ("scheduler", scheduler_class(effective))):
        given = config.value(f"{section}.params")
        if not isinstance(given, Mapping):
            continue
        for name, value in given.items():
            if not _taken(section, signature, str(name)):
                owner = signature.name if signature else "DeepSpeed"
                meant = _meant(str(name), signature) if signature else None
                path = f"{section}.params.{name}"
                yield UnknownParam(
                    path=path,
                    value=value,
                    owner=owner,
                    meant=meant if meant not in given else None,
                    takes=signature.params if signature else (),
                )


def _meant(name: str, signature: Signature) -> str | None:
    if name == _REFUSED:
        return None
    known = _ELSEWHERE.get(name)
    return known if known in signature.params else nearest(name, signature.params)


def _taken(section: str, signature: Signature | None, name: str) -> bool:
    if section == "optimizer" and name == _REFUSED:
        return False
    return signature is None or signature.open or name in signature.params


def optimizer_class(effective: Effective) -> Signature | None:
    """The class that DeepSpeed builds for the config's optimizer; None where that is not known or open."""
    name = effective.get("optimizer.type")
    if not isinstance(name, str):
        return None
    schema = effective.schema
    if name.lower() in schema.optimizer_names:
        return _deepspeed_class(effective, name.lower())
    return schema.torch_optimizers.get(name)


def _deepspeed_class(effective: Effective, name: str) -> Signature | None:
    """The choice in `DeepSpeedEngine._configure_basic_optimizer`."""
    schema = effective.schema
    on_cpu = effective.offload("optimizer") != "none"
    if name in ("adam", "adamw"):
        return _adam_class(effective, on_cpu)
    chosen = {
        "adagrad": schema.optimizers.get("DeepSpeedCPUAdagrad") if on_cpu else schema.torch_optimizers.get("Adagrad"),
        "lion": schema.optimizers.get("DeepSpeedCPULion" if on_cpu else "FusedLion"),
        "lamb": schema.optimizers.get("FusedLamb"),
    }
    return chosen.get(name)


def _adam_class(effective: Effective, on_cpu: bool) -> Signature | None:
    schema = effective.schema
    if effective.get("optimizer.params.torch_adam"):
        adamw = effective.optimizer == "adamw" or effective.get("optimizer.params.adam_w_mode") is not False
        chosen = schema.torch_optimizers.get("AdamW" if adamw else "Adam")
    elif effective.given("zero_optimization.zenflow"):
        return None
    else:
        chosen = schema.optimizers.get("DeepSpeedCPUAdam" if on_cpu else "FusedAdam")
    if chosen is None:
        return None
    params = [name for name in chosen.params if name not in _PASSED_BY_ENGINE]
    return Signature(name=chosen.name, params=(*params, *_TAKEN_OUT), open=chosen.open)


def scheduler_class(effective: Effective) -> Signature | None:
    """The class that DeepSpeed builds for the config's scheduler; None where it is not known."""
    name = effective.get("scheduler.type")
    schema = effective.schema
    if not isinstance(name, str):
        return None
    return schema.schedulers.get(name) or schema.torch_schedulers.get(name)


def unknown_type(config: ConfigFacts) -> tuple[str, str | None] | None:
    """The key of an optimizer or scheduler name that neither DeepSpeed nor torch has, and the nearest name."""
    effective = Effective.of(config)
    optimizer, scheduler = effective.get("optimizer.type"), effective.get("scheduler.type")
    if isinstance(optimizer, str) and not _known_optimizer(effective.schema, optimizer):
        names = (*effective.schema.torch_optimizers, *effective.schema.optimizer_names)
        return "optimizer.type", nearest(optimizer, names)
    if isinstance(scheduler, str) and scheduler_class(effective) is None:
        return "scheduler.type", nearest(scheduler, (*effective.schema.torch_schedulers, *effective.schema.schedulers))
    return None


def _known_optimizer(schema: Schema, name: str) -> bool:
    return name.lower() in schema.optimizer_names or name in schema.torch_optimizers
