"""Find out by trying which shapes of a value the importable DeepSpeed refuses at each key.

Runs only in the process of `dsconfig.introspect`, where DeepSpeed is imported.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dsdoctor.dsconfig.shapes import PROBES

_ZERO = "zero_optimization"
_BATCH = {"train_micro_batch_size_per_gpu": 1}
_SECTIONS: tuple[Mapping[str, Any], ...] = (
    {},
    *({_ZERO: {"stage": stage}} for stage in (1, 2, 3)),
    {_ZERO: {"stage": 1}, "fp16": {"enabled": False}, "bf16": {"bf16_master_weights_and_grads": True}},
    {"fp16": {"enabled": True}},
    {"torch_autocast": {"enabled": True}},
)
"""What stands beside a key while it is tried. A shape counts as refused only if it is beside all of them."""
_OF_THE_MACHINE = ("aio.use_gds",)
"""Keys whose values DeepSpeed judges by the accelerator that it finds."""
_WORDS = ("a", "some words", "1", "true", "cpu", "none", "fp16", "float16", "torch.float16", "step", "info")


def add_refusals(sections: Mapping[str, Any], make: Callable[[dict[str, Any]], Any]) -> None:
    """Write into every key of the table which shapes `make` (DeepSpeedConfig) raises for, where there are any."""
    logging.disable(logging.CRITICAL)
    for section, entry in sections.items():
        for name, key in entry["keys"].items():
            path = f"{section}.{name}" if section else name
            if path not in _OF_THE_MACHINE:
                _add(key, path, make)


def _add(key: dict[str, Any], path: str, make: Callable[[dict[str, Any]], Any]) -> None:
    shapes = {shape: values for shape, values in PROBES.items() if not _judged_by_content(key, shape)}
    refused = [shape for shape, values in shapes.items() if _refused(path, values, make)]
    if (not key.get("choices") or key["kind"] == "list") and _refused(path, _WORDS, make):
        refused.append("word")
    if refused:
        key["refuses"] = " ".join(refused)


def _judged_by_content(key: Mapping[str, Any], shape: str) -> bool:
    """An object where one belongs, or words in a list of words: the probe may only hold the wrong ones."""
    return shape == {"section": "object", "dict": "object", "list": "texts"}.get(key["kind"])


def _refused(path: str, values: tuple[Any, ...], make: Callable[[dict[str, Any]], Any]) -> bool:
    return not any(_accepts(config, make) for value in values for config in _configs(path, value))


def _configs(path: str, value: Any) -> Iterator[dict[str, Any]]:
    for sections in _SECTIONS:
        if path == "bfloat16" and "bf16" in sections:  # then it is not looked at
            continue
        config = copy.deepcopy({**_BATCH, **sections})  # DeepSpeed writes into what it is given
        node = config
        *parents, name = path.split(".")
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = copy.deepcopy(value)
        yield config


def _accepts(config: dict[str, Any], make: Callable[[dict[str, Any]], Any]) -> bool:
    try:
        make(config)
    except Exception:
        return False
    return True
