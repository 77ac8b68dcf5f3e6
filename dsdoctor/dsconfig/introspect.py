"""Read what the importable DeepSpeed accepts in a ds_config, and print it as JSON.

Runs only as a process of its own (`python -m dsdoctor.dsconfig.introspect`), so that it can be pointed at any release:
importing this module imports DeepSpeed and torch. Typed sections are read from their pydantic models. Sections that
DeepSpeed reads as plain dicts are found by handing it a dict that writes down which keys are asked for, and with which
defaults.
"""

from __future__ import annotations

import copy
import enum
import importlib
import inspect
import json
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.config import DeepSpeedConfig
from pydantic import BaseModel
from pydantic.v1 import BaseModel as OldModel

from dsdoctor.dsconfig import probing
from dsdoctor.dsconfig.introspect_classes import ROOT, read_optimizers, read_schedulers, torch_signatures
from dsdoctor.dsconfig.introspect_tables import CHECKED_LATER, KINDS, MOVED, OPEN, PLAIN, READ_ELSEWHERE, TYPED

NONE = type(None)


class Watched(dict):  # type: ignore[type-arg]
    """A dict that writes down every key that is asked for."""

    def __init__(self, values: dict[str, Any], seen: dict[str, Any]) -> None:
        super().__init__(values)
        self.seen = seen

    def get(self, key: str, default: Any = None) -> Any:
        self.seen[key] = default
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.seen.setdefault(key, None)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.seen.setdefault(str(key), None)
        return super().__contains__(key)

    def keys(self) -> Any:
        return WatchedKeys(self)


class WatchedKeys:
    def __init__(self, owner: Watched) -> None:
        self.owner = owner

    def __contains__(self, key: object) -> bool:
        return key in self.owner

    def __iter__(self) -> Iterator[str]:
        return iter(list(dict.keys(self.owner)))


def plain_value(value: Any) -> Any:
    """A default as JSON holds it; None for what it cannot hold."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, bool) or value is None or isinstance(value, str | float):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, list | tuple):
        return [plain_value(item) for item in value]
    return None


def with_default(entry: dict[str, Any], default: Any) -> dict[str, Any]:
    value = plain_value(default)
    if value is not None:
        entry["default"] = value
    return entry


def kind_of_annotation(annotation: Any) -> dict[str, Any]:
    """What values pydantic takes for an annotation, as `kind` (+ `choices`, `nullable`)."""
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        args = typing.get_args(annotation)
        inner = [a for a in args if a is not NONE]
        entry = kind_of_annotation(inner[0]) if len(inner) == 1 else {"kind": "any"}
        return entry | ({"nullable": True} if NONE in args else {})
    if origin is typing.Literal:
        return {"kind": "str", "choices": list(typing.get_args(annotation))}
    if origin is list and typing.get_origin(typing.get_args(annotation)[0]) is typing.Literal:
        return {"kind": "list", "choices": list(typing.get_args(typing.get_args(annotation)[0]))}
    if origin in (list, tuple, dict) or annotation in (list, tuple, dict):
        return {"kind": (origin or annotation).__name__.replace("tuple", "list")}
    if inspect.isclass(annotation) and issubclass(annotation, enum.Enum):
        values = [member.value for member in annotation]
        return {"kind": "int" if isinstance(values[0], int) else "str", "choices": values}
    if annotation in (bool, int, float, str):
        return {"kind": annotation.__name__}
    for kind in (int, float):  # pydantic 1 makes classes of its own for bounded numbers
        if inspect.isclass(annotation) and issubclass(annotation, kind):
            return {"kind": kind.__name__}
    if annotation is Path:
        return {"kind": "str"}
    return {"kind": "any"}


class Field(typing.NamedTuple):
    """A field of a model, alike for both generations of pydantic."""

    name: str
    alias: str
    annotation: Any
    nullable: bool
    default: Any
    bounds: dict[str, Any]
    extra: dict[str, Any]


def fields_of(model: Any) -> Iterator[Field]:
    bounds = ("ge", "gt", "le", "lt")
    if issubclass(model, OldModel):
        for name, old in model.__fields__.items():
            limits = {b: getattr(old.field_info, b) for b in bounds if getattr(old.field_info, b) is not None}
            extra = old.field_info.extra
            yield Field(name, old.alias, old.outer_type_, old.allow_none, old.default, limits, extra)
        return
    for name, new in model.model_fields.items():
        limits = {b: getattr(m, b) for m in new.metadata for b in bounds if getattr(m, b, None) is not None}
        default = None if new.is_required() else new.get_default(call_default_factory=True)
        yield Field(name, new.alias or name, new.annotation, False, default, limits, new.json_schema_extra or {})


def nested_model(annotation: Any) -> Any:
    candidates = [annotation, *typing.get_args(annotation)]
    return next((c for c in candidates if inspect.isclass(c) and issubclass(c, BaseModel | OldModel)), None)


def read_field(path: str, field: Field) -> dict[str, Any]:
    entry = kind_of_annotation(field.annotation) | ({"nullable": True} if field.nullable else {})
    if nested_model(field.annotation):
        entry["kind"] = "section"
    entry |= {bound: plain_value(limit) for bound, limit in field.bounds.items()}
    if field.extra.get("deprecated"):
        entry["deprecated"] = field.extra.get("new_param", "")
    if field.alias != field.name:
        entry["also"] = field.name
    return with_default(entry | CHECKED_LATER.get(path, {}), field.default)


def read_model(path: str, model: Any, sections: dict[str, Any]) -> None:
    """Write the section of a typed model, and those nested in it, into `sections`."""
    keys = {}
    for field in fields_of(model):
        keys[field.alias] = read_field(f"{path}.{field.alias}", field)
        inner = nested_model(field.annotation)
        if inner is not None:
            read_model(f"{path}.{field.alias}", inner, sections)
    forbids = (model.Config.extra if issubclass(model, OldModel) else model.model_config.get("extra")) == "forbid"
    sections[path] = {"extra": "forbid" if forbids else "ignore", "typed": True, "keys": keys}


def find_model(path: str) -> Any:
    for module, name in MOVED.get(path, [TYPED[path]]):
        try:
            found = getattr(importlib.import_module(f"deepspeed.{module}"), name, None)
        except ImportError:
            continue
        if inspect.isclass(found) and issubclass(found, BaseModel | OldModel):
            return found
    return None


def nest(path: str, leaf: Any) -> dict[str, Any]:
    config: dict[str, Any] = {}
    node = config
    *parents, last = path.split(".")
    for part in parents:
        node = node.setdefault(part, {})
    node[last] = leaf
    return config


def read_plain(path: str, seed: dict[str, Any]) -> dict[str, Any]:
    """The keys that DeepSpeed asks a plain section for, with their defaults."""
    seen: dict[str, Any] = {}
    config = nest(path, Watched(dict(seed), seen)) | {"train_batch_size": 1}
    DeepSpeedConfig(config)
    return {key: plain_entry(f"{path}.{key}", default) for key, default in sorted(seen.items())}


def plain_entry(path: str, default: Any) -> dict[str, Any]:
    if path in KINDS:
        entry = dict(KINDS[path])
    elif isinstance(default, dict):
        entry = {"kind": "section"}
    elif default == "auto":  # a text that stands for a value of another kind
        entry = {"kind": "any"}
    elif isinstance(default, bool | int | float | str | list):
        entry = {"kind": type(default).__name__}
    else:
        entry = {"kind": "any"}
    return with_default(entry | {"nullable": default is None} if default is None else entry, default)


def read_top_level() -> dict[str, Any]:
    seen: dict[str, Any] = {}
    DeepSpeedConfig(Watched({"train_batch_size": 1}, seen))
    for key, (file, _entry) in READ_ELSEWHERE.items():
        if f'"{key}"' in (ROOT / file).read_text() or f"'{key}'" in (ROOT / file).read_text():
            seen.setdefault(key, None)
    keys = {}
    for key, default in sorted(seen.items()):
        entry = dict(READ_ELSEWHERE[key][1]) if key in READ_ELSEWHERE else plain_entry(key, default)
        if key in OPEN or key in PLAIN or any(path.split(".")[0] == key for path in TYPED):
            entry = {"kind": "section"}
        keys[key] = entry
    for key in read_removed():
        keys.pop(key, None)
    keys["zero_optimization"]["also_bool"] = True
    if "bfloat16" in keys:
        keys["bfloat16"] = {"kind": "section", "deprecated": "bf16"}
    keys.setdefault("autotuning", {"kind": "section"})
    return keys


def read_removed() -> dict[str, str]:
    """Keys that this release refuses by name, with the first sentence of its reason."""
    config = importlib.import_module("deepspeed.runtime.config")
    top = getattr(config, "_REMOVED_TOP_LEVEL_CONFIG_KEYS", {})
    zero = {f"zero_optimization.{k}": v for k, v in getattr(config, "_REMOVED_ZERO_CONFIG_KEYS", {}).items()}
    return {key: text.split(". ")[0].rstrip(".") for key, text in sorted((top | zero).items())}


def plain_section(keys: dict[str, Any]) -> dict[str, Any]:
    return {"extra": "ignore", "typed": False, "keys": keys}


def read_sections() -> dict[str, Any]:
    sections = {"": plain_section(read_top_level())}
    top = sections[""]["keys"]
    for path in TYPED:
        model = find_model(path) if path.split(".")[0] in top else None
        if model is not None:
            read_model(path, model, sections)
    for path, seed in PLAIN.items():
        if path not in sections and path.split(".")[0] in top:
            sections[path] = plain_section(read_plain(path, seed))
    for entry in sections.get("zero_optimization.leaf_module", plain_section({}))["keys"].values():
        entry["kind"] = "any"  # one name is taken for a list of one
    if "timers.throughput" in sections:
        sections["timers"] = plain_section({"throughput": {"kind": "section"}})
    named = {"type": {"kind": "str"}, "params": {"kind": "section"}}
    sections["optimizer"] = plain_section(copy.deepcopy(named) | {"legacy_fusion": {"kind": "bool", "default": False}})
    sections["scheduler"] = plain_section(named)
    return sections


def main() -> None:
    sections = read_sections()
    one_rank = types.SimpleNamespace(get_rank=lambda: 0, get_world_size=lambda *_group: 1)
    setattr(importlib.import_module("deepspeed.runtime.config"), "dist", one_rank)  # noqa: B010
    probing.add_refusals(sections, DeepSpeedConfig)
    table = {
        "sections": sections,
        "removed": read_removed(),
        "optimizers": read_optimizers(),
        "schedulers": read_schedulers(),
        "torch": {
            "optimizers": torch_signatures(torch.optim, torch.optim.Optimizer),
            "schedulers": torch_signatures(torch.optim.lr_scheduler, torch.optim.lr_scheduler.LRScheduler),
        },
    }
    print(f"RELEASE {deepspeed.__version__.split('+')[0].strip()}")
    print("TABLE " + json.dumps(table, sort_keys=True))


if __name__ == "__main__":
    main()
