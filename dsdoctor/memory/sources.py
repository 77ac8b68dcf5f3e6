"""Where a model comes from: a config.json, a folder, weight files, or the id of a model in the hub's local cache.

Nothing is downloaded, nothing of the model is run, no pickled file is opened.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dsdoctor import model_config
from dsdoctor.memory import headers, hf_config, meta_build
from dsdoctor.memory.inventory import DTYPE_BYTES, Inventory
from dsdoctor.memory.parameter import Parameter
from dsdoctor.memory.shape import Shape, parameters

ADAPTER = "adapter_config.json"
_PICKLED = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


class ModelUnknown(Exception):
    """Nothing could be found out about the model; `str()` is one line for the user."""


def inventory_of(model: str) -> Inventory:
    """What `--model` names: a path, or a hub id that the cache has. Raises ModelUnknown."""
    try:
        return _of_path(_located(model))
    except (headers.HeaderUnreadable, model_config.ModelUnreadable) as error:
        raise ModelUnknown(str(error)) from None


def _located(model: str) -> Path:
    path = Path(model).expanduser()
    if model and path.exists():
        return path
    if not _ID.fullmatch(model) or model.endswith((".json", ".safetensors")):
        raise ModelUnknown(f"no such file or folder: {model}")
    snapshot = _cached(model)
    if snapshot is None:
        raise ModelUnknown(
            f"{model} is neither a path nor in the hub's cache ({_cache()}), and dsdoctor downloads nothing: "
            f"`hf download {model} config.json` fetches what is needed"
        )
    return snapshot


def _cache() -> Path:
    """Where huggingface_hub keeps models, by its own variables."""
    for name, below in (("HF_HUB_CACHE", ""), ("HUGGINGFACE_HUB_CACHE", ""), ("HF_HOME", "hub")):
        if os.environ.get(name):
            return Path(os.environ[name], below).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface", "hub").expanduser()


def _cached(model: str) -> Path | None:
    """The snapshot that `main` points to, else the newest one."""
    folder = _cache() / f"models--{model.replace('/', '--')}"
    try:
        named = folder / "snapshots" / (folder / "refs" / "main").read_text(encoding="utf-8").strip()
        if named.is_dir():
            return named
    except (OSError, ValueError):
        pass
    try:
        return max(folder.glob("snapshots/*/"), key=lambda path: path.stat().st_mtime, default=None)
    except OSError:  # the cache of another user
        return None


def _of_path(path: Path) -> Inventory:
    if path.is_dir():
        return _of_folder(path)
    if path.suffix in _PICKLED:
        raise ModelUnknown(
            f"{path} may be a pickled file, which dsdoctor does not open; give the config.json beside it"
        )
    if path.name.endswith(".safetensors.index.json"):
        return _weighed(headers.of_index(path), path, _shape_beside(path.parent))
    if path.suffix == ".safetensors":
        return _weighed([path], path, None)
    return _of_config(path)


def _of_folder(folder: Path) -> Inventory:
    """The headers of the weights where they are there, which are exact; the config for the model's shape."""
    if (folder / ADAPTER).is_file():
        return _of_adapter(folder)
    files = headers.files_of(folder)
    if files:
        return _weighed(files, folder, _shape_beside(folder))
    if (folder / "config.json").is_file():
        return _of_config(folder / "config.json")
    if any(one.suffix in _PICKLED for one in folder.iterdir()):
        raise ModelUnknown(f"{folder} has only pickled weights and no config.json; pickled files are not opened")
    raise ModelUnknown(f"{folder} has neither a config.json nor safetensors files")


def _of_adapter(folder: Path) -> Inventory:
    """A folder of PEFT: the adapter's weights are trained, the model that it names is frozen."""
    base = model_config.read(folder / ADAPTER).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise ModelUnknown(f"{folder / ADAPTER} names no base model")
    model = inventory_of(base)
    frozen = tuple(one._replace(trainable=False) for one in model.parameters)
    adapters = headers.of_files(headers.files_of(folder))
    return replace(model, parameters=(*frozen, *adapters), tied=0, source=f"{model.source}, with an adapter")


def _weighed(files: list[Path], path: Path, shape: Shape | None) -> Inventory:
    listed = headers.of_files(files)
    names = {one.name for one in listed}
    tied = 0
    if shape is not None and shape.tied and not any(name.startswith("lm_head.") for name in names):
        tied = shape.vocab * shape.hidden
    return Inventory(
        parameters=listed, name=path.name, source=f"headers of {len(files)} safetensors file(s)", tied=tied, shape=shape
    )


def _shape_beside(folder: Path) -> Shape | None:
    try:
        return hf_config.shape_of(model_config.read(folder))
    except (model_config.ModelUnreadable, hf_config.NoShape):
        return None


def _of_config(path: Path) -> Inventory:
    """Arithmetic where the type of model is known, else a build on the meta device, else arithmetic all the same."""
    config = model_config.read(path)
    loaded = _loaded(config)
    try:
        shape: Shape | None = hf_config.shape_of(config)
        why = ""
    except hf_config.AbsurdSize as error:
        raise ModelUnknown(f"{path}: {error}") from None
    except hf_config.NoShape as error:
        shape, why = None, str(error)
    if shape is not None and hf_config.known(config):
        return _computed(config, path, shape, loaded, ())
    try:
        built = meta_build.build(path, loaded=loaded)
        return replace(built, shape=None if shape is None else replace(shape, approximate=True))
    except meta_build.CannotBuild as error:
        if shape is None:
            raise ModelUnknown(f"{path}: {why}; {error}") from None
        said = (
            f"{error}; the parameters are counted from the sizes in the config.json, as of a decoder of the usual make"
        )
        return _computed(config, path, shape, loaded, (said,))


def _computed(
    config: Mapping[str, Any], path: Path, shape: Shape, loaded: float, made_up: tuple[str, ...]
) -> Inventory:
    listed: tuple[Parameter, ...] = parameters(shape, loaded=loaded)
    return Inventory(
        parameters=listed,
        name=str(config.get("model_type") or path.name),
        source=f"arithmetic from {path}",
        tied=shape.vocab * shape.hidden if shape.tied else 0,
        shape=shape,
        made_up=made_up,
    )


def _loaded(config: Mapping[str, Any]) -> float:
    """Bytes of an element in the model's files; fp32 where the config does not say."""
    name = model_config.understood("", config).dtype
    return DTYPE_BYTES.get(name or "float32", 4.0)
