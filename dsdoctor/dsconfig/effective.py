"""The config as DeepSpeed understands it: defaults filled in, both spellings of a key, old spellings translated.

`Effective.get` answers for the key's usual name (`zero_optimization.stage3_prefetch_bucket_size`). "auto" in a typed
section is the default there, which is what DeepSpeed makes of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dsdoctor.dsconfig import keys
from dsdoctor.dsconfig.facts import ConfigFacts
from dsdoctor.dsconfig.schema import Schema, schema_for

_MISSING = object()
_WORDS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
_ZERO = "zero_optimization"


@dataclass(frozen=True, kw_only=True)
class Effective:
    """One config under one schema. `data` is what the user wrote."""

    data: Mapping[str, Any]
    schema: Schema

    @classmethod
    def of(cls, facts: ConfigFacts) -> Effective:
        return cls(data=facts.data, schema=schema_for(facts.release))

    def get(self, key: str) -> Any:
        """The value in force for a dotted key; None where neither config nor schema has one."""
        value = self._written(key)
        entry = self.schema.key(key)
        if value is _MISSING or (value == "auto" and self._typed(key)):
            return self._default(key)
        return _converted(value, entry.kind) if entry and self._typed(key) else value

    def given(self, key: str) -> bool:
        """Whether the config says something for the key, under any spelling."""
        return self._written(key) is not _MISSING

    @property
    def stage(self) -> int:
        """The ZeRO stage, 0 to 3; 0 too where the value is none of these."""
        stage = self.get(f"{_ZERO}.stage")
        return stage if stage in (1, 2, 3) and not isinstance(stage, bool) else 0

    @property
    def precision(self) -> Literal["fp32", "fp16", "bf16"]:
        """What the weights are cast to; with both switched on (which DeepSpeed refuses) fp16."""
        if self.get("fp16.enabled") is True:
            return "fp16"
        return "bf16" if self.get("bf16.enabled") is True else "fp32"

    @property
    def optimizer(self) -> str | None:
        """The optimizer's name in lower case, None where the script brings its own."""
        name = self.get("optimizer.type")
        return name.lower() if isinstance(name, str) else None

    def offload(self, what: Literal["optimizer", "param"]) -> Literal["none", "cpu", "nvme"]:
        """Where the optimizer states or the parameters are asked to go, whatever the stage makes of it."""
        device = self.get(f"{_ZERO}.offload_{what}.device")
        if device == "cpu":
            return "cpu"
        return "nvme" if device == "nvme" else "none"

    def _typed(self, key: str) -> bool:
        section = self.schema.sections.get(key.rpartition(".")[0])
        return section is not None and section.typed

    def _written(self, key: str) -> Any:
        value = keys.get(self.data, key, _MISSING)
        entry = self.schema.key(key)
        if value is _MISSING and entry is not None and entry.also:
            value = keys.get(self.data, f"{key.rpartition('.')[0]}.{entry.also}", _MISSING)
        return value if value is not _MISSING else self._old_spelling(key)

    def _old_spelling(self, key: str) -> Any:
        if key.startswith("bf16."):
            return (
                keys.get(self.data, f"bfloat16.{key.partition('.')[2]}", _MISSING)
                if "bf16" not in self.data
                else _MISSING
            )
        zero = self.data.get(_ZERO)
        if isinstance(zero, bool):
            return int(zero) if key == f"{_ZERO}.stage" else _MISSING
        if not isinstance(zero, Mapping):
            return _MISSING
        if key == f"{_ZERO}.stage3_gather_16bit_weights_on_model_save":
            return zero.get("stage3_gather_fp16_weights_on_model_save", _MISSING)
        return _old_offload(zero, key)

    def _default(self, key: str) -> Any:
        if key == f"{_ZERO}.overlap_comm":
            return self.stage == 3
        return self.schema.default(key)


def _old_offload(zero: Mapping[str, Any], key: str) -> Any:
    """`cpu_offload: true` stands for an offload section with device cpu."""
    for old, new in (("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param")):
        if key == f"{_ZERO}.{new}.device" and _converted(zero.get(old), "bool") is True:
            return "cpu"
    return _MISSING


def _converted(value: Any, kind: str) -> Any:
    """What pydantic makes of a value in a typed section; the value itself where it would refuse it."""
    if kind == "bool":
        if isinstance(value, str):
            return _WORDS.get(value.strip().lower(), value)
        return bool(value) if value in (0, 1) and not isinstance(value, bool) else value
    if kind == "int" and isinstance(value, float) and value.is_integer():
        return int(value)
    if kind in ("int", "float") and isinstance(value, str):
        try:
            return int(value) if kind == "int" else float(value)
        except ValueError:
            return value
    return value
