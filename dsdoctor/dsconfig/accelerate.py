"""Accelerate's own config file: what its `deepspeed_config` section comes to as a ds_config."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

SECTION = "deepspeed_config"
_ZERO = "zero_optimization"
_NAMES = {
    "zero_stage": f"{_ZERO}.stage",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "gradient_clipping",
    "offload_optimizer_device": f"{_ZERO}.offload_optimizer.device",
    "offload_optimizer_nvme_path": f"{_ZERO}.offload_optimizer.nvme_path",
    "offload_param_device": f"{_ZERO}.offload_param.device",
    "offload_param_nvme_path": f"{_ZERO}.offload_param.nvme_path",
    "zero3_save_16bit_model": f"{_ZERO}.stage3_gather_16bit_weights_on_model_save",
}
"""Names of the section, and the ds_config keys that `accelerate.utils.DeepSpeedPlugin` makes of them."""
_PRECISION = "mixed_precision"
_ITS_OWN = ("distributed_type", "compute_environment", "num_processes", _PRECISION)


@dataclass(frozen=True, kw_only=True)
class Plugin:
    """What the file says for DeepSpeed: a ds_config of its own, or the name of one in `config_file`.

    `names` maps dotted ds_config keys to the dotted keys of the file. `ranks` is `num_processes`.
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    config_file: str | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    ranks: int | None = None


def plugin(data: Any) -> Plugin | None:
    """DeepSpeed's part of an Accelerate config, None for anything else."""
    given = data.get(SECTION) if isinstance(data, Mapping) else None
    if not isinstance(given, Mapping) or not (len(data) == 1 or any(name in data for name in _ITS_OWN)):
        return None
    ranks = data.get("num_processes")
    ranks = ranks if isinstance(ranks, int) and ranks > 0 else None
    file = given.get("deepspeed_config_file")
    if isinstance(file, str) and file not in ("", "none"):
        return Plugin(config_file=file, ranks=ranks)
    return Plugin(config=_as_ds_config(data, given), names=dict(_places(data, given)), ranks=ranks)


def _as_ds_config(data: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """What the plugin builds; it trains any optimizer, since the script brings its own."""
    config: dict[str, Any] = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", _ZERO: {}}
    for name, key in _NAMES.items():
        value = given.get(name)
        if value is None or (name.endswith(("_device", "_path")) and value == "none"):
            continue
        node = config
        *parents, last = key.split(".")
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    if data.get(_PRECISION) in ("fp16", "bf16"):
        config[data[_PRECISION]] = {"enabled": True}
    return config | {"zero_allow_untested_optimizer": True}


def _places(data: Mapping[str, Any], given: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Where each key of the ds_config comes from; a section is where its first key comes from."""
    yield _ZERO, SECTION
    for name, key in _NAMES.items():
        if name in given:
            yield key, f"{SECTION}.{name}"
            if key.count(".") > 1:
                yield key.rpartition(".")[0], f"{SECTION}.{name}"
    if data.get(_PRECISION) in ("fp16", "bf16"):
        yield data[_PRECISION], _PRECISION
        yield f"{data[_PRECISION]}.enabled", _PRECISION
