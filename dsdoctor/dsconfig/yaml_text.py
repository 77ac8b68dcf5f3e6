"""YAML beside a ds_config: Accelerate's own config file with its `deepspeed_config` section, and argument files.

PyYAML comes with Accelerate and Transformers; where it is missing there is no YAML of theirs to read either.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

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


class YamlUnreadable(Exception):
    """The text is not YAML, or there is no reader for it."""


@dataclass(frozen=True, kw_only=True)
class Plugin:
    """What an Accelerate YAML says for DeepSpeed: a ds_config of its own, or the name of one in `config_file`.

    `places` maps dotted ds_config keys to line and column of the YAML, both from 1. `ranks` is `num_processes`.
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    config_file: str | None = None
    places: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    ranks: int | None = None


def load(text: str) -> Any:
    """The value of a YAML text. Raises YamlUnreadable."""
    try:
        import yaml
    except ImportError:
        raise YamlUnreadable("reading YAML needs PyYAML, which is not installed") from None
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise YamlUnreadable(" ".join(str(error).split())) from None


def plugin(text: str) -> Plugin | None:
    """DeepSpeed's part of an Accelerate YAML, None for any other YAML. Raises YamlUnreadable."""
    data = load(text)
    given = data.get("deepspeed_config") if isinstance(data, Mapping) else None
    if not isinstance(given, Mapping):
        return None
    ranks = data.get("num_processes")
    ranks = ranks if isinstance(ranks, int) and ranks > 0 else None
    file = given.get("deepspeed_config_file")
    if isinstance(file, str) and file not in ("", "none"):
        return Plugin(config_file=file, ranks=ranks)
    config = _as_ds_config(given)
    if data.get("mixed_precision") in ("fp16", "bf16"):
        config[data["mixed_precision"]] = {"enabled": True}
    return Plugin(config=config, places=_places(text), ranks=ranks)


def _as_ds_config(given: Mapping[str, Any]) -> dict[str, Any]:
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
    return config | {"zero_allow_untested_optimizer": True}


def _places(text: str) -> dict[str, tuple[int, int]]:
    places: dict[str, tuple[int, int]] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        match = re.match(r"\s*([A-Za-z_0-9]+)\s*:", line)
        if match is not None and match.group(1) in _NAMES:
            places[_NAMES[match.group(1)]] = (number, match.start(1) + 1)
    return places
