"""A first ds_config for a model and GPUs: the cheapest row of the memory model's ladder that fits."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dsdoctor.dsconfig import patch
from dsdoctor.machine.facts import Device, MachineFacts
from dsdoctor.memory.estimate import Use, estimate
from dsdoctor.memory.facts import Need
from dsdoctor.runs.facts import ModelFacts
from dsdoctor.units import size

_ZERO = "zero_optimization"
_GATHER = {_ZERO: {"stage3_gather_16bit_weights_on_model_save": True}}
_ADAMW: Mapping[str, Any] = {"type": "AdamW", "params": {"lr": 1e-5, "weight_decay": 0.01}}
_HF_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
_SCALE = {"loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1}
_LAYERS_OF_A_TRANSFORMER = 32


class NothingFits(Exception):
    """No ZeRO stage with CPU offload fits; `str()` is one line for the user."""


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What the config is for. Sizes are bytes; `host_bytes` is free on the one host that has the `gpus`."""

    parameters: int
    gpus: int
    gpu_bytes: int
    host_bytes: int
    precision: Literal["bf16", "fp16"] = "bf16"
    hugging_face: bool = False


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """The config, in a sentence why, and what the memory model took for granted."""

    config: dict[str, Any]
    why: str
    assumptions: tuple[str, ...]


def fitting(wish: Wish) -> Chosen:
    """The config for a wish. Raises NothingFits."""
    plain = _base(wish, hugging_face=False)
    largest = max(wish.parameters // _LAYERS_OF_A_TRANSFORMER, 1)
    model = ModelFacts(class_name="model", parameters=wish.parameters, trainable=wish.parameters, largest_layer=largest)
    devices = tuple(Device(index=index, name="GPU", total_bytes=wish.gpu_bytes) for index in range(wish.gpus))
    machine = MachineFacts(devices=devices, memory_available=wish.host_bytes)
    facts = estimate(plain, model, machine, nproc_per_node=wish.gpus, device="cuda")
    if facts.recommended is None:
        sharded = Use(zero_init=True)
        facts = estimate(plain, model, machine, nproc_per_node=wish.gpus, device="cuda", use=sharded)
    if facts.recommended is None:
        raise NothingFits(
            f"{wish.parameters:,} parameters fit on {wish.gpus} GPUs of {size(wish.gpu_bytes)} with "
            f"{size(wish.host_bytes)} of host memory at no ZeRO stage, with CPU offload neither"
        )
    need = facts.needs[facts.recommended]
    config = patch.apply(_base(wish, hugging_face=wish.hugging_face), facts.patch or {})
    if need.stage == 3:
        config = patch.apply(config, _GATHER)
    return Chosen(config=config, why=_why(need, wish), assumptions=facts.assumptions)


def _why(need: Need, wish: Wish) -> str:
    places = (("optimizer", need.offload_optimizer), ("parameters", need.offload_param))
    offloads = [name for name, where in places if where != "none"]
    off = f" with {' and '.join(offloads)} on the CPU" if offloads else ""
    needs = f"{size(need.per_gpu.peak)} of {size(wish.gpu_bytes)} a GPU"
    return f"ZeRO stage {need.stage}{off} needs {needs}, activations apart"


def _base(wish: Wish, *, hugging_face: bool) -> dict[str, Any]:
    """The config before the stage is chosen: fp16 needs at least stage 1, where the loss is scaled."""
    switch: Any = "auto" if hugging_face else True
    if hugging_face:
        config: dict[str, Any] = dict.fromkeys(_HF_BATCH, "auto")
        config["optimizer"] = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}}
    else:
        config = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "gradient_clipping": 1.0}
        config["optimizer"] = copy.deepcopy(dict(_ADAMW))
    config[wish.precision] = {"enabled": switch} | (_SCALE if wish.precision == "fp16" else {})
    return config | {_ZERO: {"stage": 1}}
