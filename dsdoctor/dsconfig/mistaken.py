"""Other files that are given for a ds_config by mistake, told by their keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dsdoctor.dsconfig import batch

_OWN = (batch.TRAIN, batch.MICRO, "zero_optimization")
"""Keys that hardly a ds_config is without, and that no other file has at its top."""
_HOLDERS = ("deepspeed", "deepspeed_config", "ds_config", "deepspeed_config_file")
_NEOX = ("pipe-parallel-size", "pipe_parallel_size", "model-parallel-size", "model_parallel_size")
_ARGUMENTS = ("per_device_train_batch_size", "output_dir", "num_train_epochs")


@dataclass(frozen=True, kw_only=True)
class Mistaken:
    """What a file is, and what to do with it."""

    what: str
    instead: str


def told(data: Any) -> Mistaken | None:
    """What the keys of a file say that it is; None for a ds_config and for anything unknown."""
    if not isinstance(data, Mapping):
        return None
    if any(name in data for name in _NEOX) and ("num-layers" in data or "num_layers" in data):
        return Mistaken(
            what="this is a config of GPT-NeoX, which makes the ds_config itself",
            instead="give the ds_config that GPT-NeoX prints when it starts",
        )
    return None if any(name in data for name in _OWN) else _without_own_keys(data)


def _without_own_keys(data: Mapping[str, Any]) -> Mistaken | None:
    for name in _HOLDERS:
        held = data.get(name)
        if isinstance(held, str) and held:
            return Mistaken(what=f"this file names a ds_config ({name}), it is none", instead=f"give {held}")
        if isinstance(held, Mapping) and any(key in held for key in _OWN):
            return Mistaken(
                what=f"the ds_config stands under {name}; DeepSpeed reads the top of its file only",
                instead=f"move what stands under {name} to a file of its own, and give that",
            )
    if "distributed_type" in data:
        kind = data["distributed_type"]
        return Mistaken(
            what=f"this is a config of Accelerate for {kind}, with nothing for DeepSpeed in it",
            instead="run `accelerate config` for DeepSpeed, or give a ds_config",
        )
    if "model_type" in data or "architectures" in data:
        return Mistaken(what="this is the config.json of a model", instead="give the ds_config; this file to --model")
    if any(name in data for name in _ARGUMENTS):
        return Mistaken(
            what="these are TrainingArguments of Transformers", instead="give the ds_config; this file to --hf-args"
        )
    return None
