"""Builds the torch optimizer that a ds_config's `optimizer` section means. Runs in rank processes only (imports torch).

DeepSpeed picks among fused, CPU and torch versions of one rule; here each rule has one plain version.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from dsdoctor.runs.plain.errors import UnsupportedByPlain
from dsdoctor.runs.plain.rules import Lamb, Lion, PlainAdam

Factory = Callable[..., Optimizer]

_ONLY_DEEPSPEED = ("onebitadam", "zerooneadam", "onebitlamb", "muon", "muadam", "muadamw", "musgd")
_WHY_NOT = {
    "muon": ": under ZeRO DeepSpeed clips the orthogonalised update, torch.optim.Muon the gradient that it comes from, "
    "which changes nothing of it",
}
_HOW_NOT_WHAT = ("torch_adam", "adam_w_mode", "fp32_optimizer_states", "set_grad_none", "foreach")
"""Parameters that choose an implementation, not the mathematics."""


def from_config(name: str, params: Any, options: Mapping[str, Any], notes: list[str]) -> Optimizer:
    """Build the optimizer `name` over `params` (tensors or group dicts). What its class does not know goes to `notes`.

    Raises:
        UnsupportedByPlain: one of DeepSpeed's own optimizers without a plain version.
        AttributeError: neither DeepSpeed nor `torch.optim` has it.
    """
    factory, known = _rule(name, options)
    wanted = {key: value for key, value in options.items() if key not in _HOW_NOT_WHAT}
    unknown = sorted(set(wanted) - known)
    if unknown:
        notes.append(f"optimizer.params {', '.join(unknown)} mean nothing to {name} here: left out")
    return factory(params, **{key: value for key, value in wanted.items() if key in known})


def _rule(name: str, options: Mapping[str, Any]) -> tuple[Factory, set[str]]:
    lower = name.lower()
    if lower in _ONLY_DEEPSPEED:
        raise UnsupportedByPlain(f"the optimizer {name} has no plain counterpart{_WHY_NOT.get(lower, '')}")
    if lower in ("adam", "adamw"):
        return _adam(options, decoupled=lower == "adamw" or bool(options.get("adam_w_mode", True)))
    own: dict[str, type[Optimizer]] = {"lamb": Lamb, "lion": Lion, "adagrad": torch.optim.Adagrad}
    chosen = own.get(lower) or getattr(torch.optim, name)
    return chosen, _accepted(chosen)


def _adam(options: Mapping[str, Any], *, decoupled: bool) -> tuple[Factory, set[str]]:
    if not options.get("bias_correction", True):
        return partial(PlainAdam, decoupled=decoupled), _accepted(PlainAdam)
    chosen = torch.optim.AdamW if decoupled else torch.optim.Adam
    known = _accepted(chosen) | {"bias_correction"}
    if options.get("torch_adam"):
        return _without_bias_key(chosen), known
    return _without_bias_key(partial(chosen, weight_decay=0.0)), known


def _without_bias_key(factory: Callable[..., Optimizer]) -> Factory:
    def build(params: Any, bias_correction: bool = True, **options: Any) -> Optimizer:
        return factory(params, **options)

    return build


def _accepted(chosen: Callable[..., Any]) -> set[str]:
    return set(inspect.signature(chosen).parameters) - {"self", "params"}


def from_client(optimizer: Any, params: Any) -> Optimizer:
    """The optimizer that the script passed: an object, or a callable that makes one from the parameters.

    One of DeepSpeed's fused or CPU classes is exchanged for its plain rule over the very same group dicts, so that a
    scheduler built on it goes on working.
    """
    built: Optimizer = optimizer if isinstance(optimizer, Optimizer) else optimizer(params)
    if not type(built).__module__.startswith("deepspeed."):
        return built
    plain = _plain_rule_of(built)
    groups = built.param_groups
    for group in groups:
        for key, value in plain.defaults.items():
            group.setdefault(key, value)
    plain.param_groups = groups
    return plain


def _plain_rule_of(optimizer: Optimizer) -> Optimizer:
    name = type(optimizer).__name__
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if "Adam" in name and name in ("FusedAdam", "DeepSpeedCPUAdam"):
        decoupled = bool(getattr(optimizer, "adam_w_mode", getattr(optimizer, "adamw_mode", True)))
        return PlainAdam(parameters, decoupled=decoupled)
    rules: dict[str, Factory] = {
        "FusedLion": Lion,
        "DeepSpeedCPULion": Lion,
        "FusedLamb": Lamb,
        "DeepSpeedCPUAdagrad": torch.optim.Adagrad,
    }
    if name not in rules:
        raise UnsupportedByPlain(f"the optimizer {type(optimizer).__module__}.{name} has no plain counterpart")
    return rules[name](parameters)
