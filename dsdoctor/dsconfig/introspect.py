"""Read what the importable DeepSpeed accepts in a ds_config, and print it as JSON.

Runs only as a process of its own (`python -m dsdoctor.dsconfig.introspect`), so that it can be pointed at any release:
importing this module imports DeepSpeed and torch. Typed sections are read from their
pydantic models. Sections that DeepSpeed reads as plain dicts are found by handing it a dict that writes down which
keys are asked for, and with which defaults. Signatures of optimizers and schedulers come from their source text,
since importing them may compile kernels.
"""

from __future__ import annotations

import ast
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

NONE = type(None)
ROOT = Path(deepspeed.__file__).parent

TYPED = {
    "zero_optimization": ("runtime.zero.config", "DeepSpeedZeroConfig"),
    "fp16": ("runtime.precision_config", "DeepSpeedFP16Config"),
    "bf16": ("runtime.precision_config", "DeepSpeedBF16Config"),
    "comms_logger": ("comm.config", "CommsLoggerConfig"),
    "tensorboard": ("monitor.config", "TensorBoardConfig"),
    "wandb": ("monitor.config", "WandbConfig"),
    "csv_monitor": ("monitor.config", "CSVConfig"),
    "comet": ("monitor.config", "CometConfig"),
    "compile": ("runtime.compiler", "CompileConfig"),
    "hybrid_engine": ("runtime.config", "HybridEngineConfig"),
    "timers.throughput": ("utils.config", "DeepSpeedThroughputTimerConfig"),
    "tensor_parallel": ("runtime.tensor_parallel.config", "TPTrainingConfig"),
    "weight_quantization": ("inference.config", "WeightQuantConfig"),
    "nebula": ("nebula.config", "DeepSpeedNebulaConfig"),
}
MOVED = {"compile": [("compile.config", "CompileConfig"), ("runtime.compiler", "CompileConfig")]}

PLAIN: dict[str, dict[str, Any]] = {
    "fp16": {"enabled": True, "loss_scale_window": 1000},
    "bf16": {"enabled": True},
    "activation_checkpointing": {},
    "flops_profiler": {},
    "aio": {},
    "data_types": {},
    "checkpoint": {},
    "checkpoint.parallel_write": {},
    "checkpoint.writer": {},
    "torch_autocast": {"enabled": True},
}
OPEN = (
    "data_efficiency",
    "curriculum_learning",
    "progressive_layer_drop",
    "eigenvalue",
    "quantize_training",
    "compression_training",
    "sparse_attention",
    "amp",
    "autotuning",
    "elasticity",
    "nebula",
    "graph_harvesting",
    "datastates_ckpt",
    "expert_parallel",
    "optimizer.params",
    "scheduler.params",
    "timers",
    "weight_quantization",
    "pipeline",
)
"""Sections whose keys are not checked: free by nature, or of more shapes than one table holds."""

READ_ELSEWHERE: dict[str, tuple[str, dict[str, Any]]] = {
    "data_parallel_size": ("__init__.py", {"kind": "int"}),
    "sequence_parallel_size": ("__init__.py", {"kind": "int"}),
    "vocabulary_size": ("runtime/config.py", {"kind": "int", "nullable": True}),
}
"""Top-level keys that some other place than DeepSpeedConfig's first pass reads; listed if that file names them."""

DTYPES = sorted(
    name
    for dtype in ("float16", "float32", "bfloat16")
    for name in (dtype, f"torch.{dtype}", {"float16": "fp16", "float32": "fp32", "bfloat16": "bf16"}[dtype])
)
"""The spellings of `inference.config.DtypeEnum` for the types that autocast takes."""
KINDS: dict[str, dict[str, Any]] = {
    "train_batch_size": {"kind": "int"},
    "train_micro_batch_size_per_gpu": {"kind": "int"},
    "gradient_accumulation_steps": {"kind": "int"},
    "steps_per_print": {"kind": "float"},
    "gradient_clipping": {"kind": "float"},
    "gradient_predivide_factor": {"kind": "float"},
    "communication_data_type": {"kind": "str", "choices": ["fp16", "bf16", "fp32"]},
    "seq_parallel_comm_data_type": {"kind": "str", "choices": ["fp16", "bf16", "fp32"]},
    "seq_parallel_communication_data_type": {"kind": "str", "choices": ["fp16", "bf16", "fp32"]},
    "gradient_allreduce_op": {"kind": "str", "choices": ["mean", "sum"]},
    "log_level": {"kind": "str"},
    "activation_checkpointing.number_checkpoints": {"kind": "int"},
    "flops_profiler.output_file": {"kind": "str"},
    "flops_profiler.recompute_fwd_factor": {"kind": "float"},
    "flops_profiler.detailed": {"kind": "bool"},
    "data_types.grad_accum_dtype": {"kind": "str", "choices": ["fp16", "bf16", "fp32"]},
    "data_types.param_dtype": {"kind": "str"},
    "data_types.buffer_dtype": {"kind": "str"},
    "data_types.keep_in_fp32_modules": {"kind": "any"},
    "checkpoint.tag_validation": {"kind": "str", "choices": ["ignore", "warn", "fail"]},
    "checkpoint.checkpoint_serialization": {"kind": "bool"},
    "fp16.loss_scale": {"kind": "float"},
    "torch_autocast.dtype": {"kind": "str", "choices": DTYPES},
    "checkpoint.writer": {"kind": "section", "nullable": True},
    "checkpoint.writer.type": {"kind": "str", "choices": ["mock", "python", "fast"]},
    "checkpoint.writer.data_parallel": {"kind": "str", "choices": ["replica", "socket", "machine"]},
    "torch_autocast.lower_precision_safe_modules": {"kind": "list"},
    "optimizer": {"kind": "section"},
    "scheduler": {"kind": "section"},
}
"""What Python does with the value of a plain key whose default does not tell."""


CHECKED_LATER: dict[str, dict[str, Any]] = {
    "zero_optimization.zenflow.select_strategy": {"choices": ["auto", "step", "epoch"]},
}
"""What a validator of a typed section demands beyond the type."""


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


def signature(file: str, class_name: str) -> dict[str, Any] | None:
    """Parameters of a class's constructor, read from its source without importing it."""
    path = ROOT / file
    if not path.exists():
        return None
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef) and node.name == class_name:
            init = next(n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__")
            names = [a.arg for a in init.args.args + init.args.kwonlyargs][2:]
            return {"params": names} | ({"open": True} if init.args.kwarg else {})
    return None


DEEPSPEED_OPTIMIZERS = {
    "FusedAdam": "ops/adam/fused_adam.py",
    "DeepSpeedCPUAdam": "ops/adam/cpu_adam.py",
    "FusedLamb": "ops/lamb/fused_lamb.py",
    "DeepSpeedCPUAdagrad": "ops/adagrad/cpu_adagrad.py",
    "FusedLion": "ops/lion/fused_lion.py",
    "DeepSpeedCPULion": "ops/lion/cpu_lion.py",
    "OnebitAdam": "runtime/fp16/onebit/adam.py",
    "ZeroOneAdam": "runtime/fp16/onebit/zoadam.py",
    "OnebitLamb": "runtime/fp16/onebit/lamb.py",
}
SCHEDULERS = ("LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR")


def read_optimizers() -> dict[str, Any]:
    config = importlib.import_module("deepspeed.runtime.config")
    classes = {name: signature(file, name) for name, file in DEEPSPEED_OPTIMIZERS.items()}
    return {
        "names": sorted(name.lower() for name in config.DEEPSPEED_OPTIMIZERS),
        "classes": {name: found for name, found in classes.items() if found},
    }


def read_schedulers() -> dict[str, Any]:
    found = {name: signature("runtime/lr_schedules.py", name) for name in SCHEDULERS}
    return {name: entry for name, entry in found.items() if entry}


def torch_signatures(module: types.ModuleType, base: type) -> dict[str, Any]:
    """Constructor parameters of torch's own optimizers or schedulers, which a config can name too."""
    found = {}
    for name, value in sorted(vars(module).items()):
        if inspect.isclass(value) and issubclass(value, base) and value is not base and not name.startswith("_"):
            names = list(inspect.signature(value.__init__).parameters)[2:]
            found[name] = {"params": [n for n in names if n != "kwargs"]}
    return found


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
