"""What a model's Hugging Face `config.json` says of it, as far as a ds_config has to fit to it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsdoctor.scripts.facts import ScriptFacts

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_DTYPES = ("dtype", "torch_dtype")
_TIED = "tie_word_embeddings"
_PART = ("_config", "decoder", "encoder", "generator", "question_encoder")
_DEEPEST = 3
_LARGEST = 2**20
_MODEL_ARGUMENTS = ("model_name_or_path", "model_path", "model")


class ModelUnreadable(Exception):
    """The config.json is missing or holds something else; `str()` is one line for the user."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One config.json. `dtype` is the one that the weights are saved in, as written there; `experts` a layer.

    `hidden_size` is the one that Transformers takes for "auto" bucket sizes, `heads` and `kv_heads` are those of the
    attention; None where the file does not say.
    """

    path: str
    model_type: str = ""
    dtype: str | None = None
    experts: int = 0
    tied: bool | None = None
    hidden_size: int | None = None
    heads: int | None = None
    kv_heads: int | None = None


def named_by(script: ScriptFacts | None, arguments: Mapping[str, Any]) -> ModelConfig | None:
    """The model that a job names, if it lies on this disk: in the script's arguments, or in its `from_pretrained`."""
    calls = script.named("from_pretrained") if script is not None else ()
    names = [arguments.get(name) for name in _MODEL_ARGUMENTS] + [call.first for call in calls]
    for name in names:
        if isinstance(name, str) and name and (Path(name) / "config.json").is_file():
            try:
                return load(Path(name))
            except ModelUnreadable:
                continue
    return None


def load(path: Path) -> ModelConfig:
    """Read a config.json, or the one in a folder, as far as a ds_config goes. Raises ModelUnreadable."""
    return understood(str(_file(path)), read(path))


def _file(path: Path) -> Path:
    return path / "config.json" if path.is_dir() else path


def read(path: Path) -> dict[str, Any]:
    """A config.json as it is, or the one in a folder. Raises ModelUnreadable."""
    file = _file(path)
    try:
        if file.stat().st_size > _LARGEST:
            raise ModelUnreadable(f"not a model's config.json: {file} is too large")
        data = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelUnreadable(f"cannot read the model's config.json: {file}: {error.strerror or error}") from None
    except (ValueError, RecursionError):
        raise ModelUnreadable(f"not a model's config.json: {file} is not JSON") from None
    if not isinstance(data, dict):
        raise ModelUnreadable(f"not a model's config.json: {file} holds no object")
    return data


def understood(path: str, data: Mapping[str, Any]) -> ModelConfig:
    parts = tuple(_parts(data))
    experts = [part[name] for part in parts for name in _EXPERTS if _is_count(part.get(name))]
    dtype = next((str(part[name]) for part in parts for name in _DTYPES if part.get(name)), None)
    tied = next((part[_TIED] for part in parts if isinstance(part.get(_TIED), bool)), None)
    return ModelConfig(
        path=path,
        model_type=str(data.get("model_type", "")),
        dtype=dtype.removeprefix("torch.") if dtype else None,
        experts=max(experts, default=0),
        tied=tied,
        hidden_size=_hidden_size(data),
        heads=_first(parts, "num_attention_heads"),
        kv_heads=_first(parts, "num_key_value_heads"),
    )


def _hidden_size(data: Mapping[str, Any]) -> int | None:
    """As Transformers looks for it: `hidden_size`, the largest of `hidden_sizes`, and both of `text_config`."""
    text = data.get("text_config")
    for part in (data, text if isinstance(text, Mapping) else {}):
        several = part.get("hidden_sizes")
        sizes = several if isinstance(several, list) else []
        found = [size for size in (part.get("hidden_size"), *sizes) if _is_count(size)]
        if found:
            return int(max(found))
    return None


def _first(parts: tuple[Mapping[str, Any], ...], name: str) -> int | None:
    return next((int(part[name]) for part in parts if isinstance(part.get(name), int)), None)


def _parts(data: Mapping[str, Any], depth: int = 0) -> Iterator[Mapping[str, Any]]:
    """The config and the configs of its parts (`text_config`, `llm_config`, `thinker_config.text_config`, ...)."""
    yield data
    inner = [value for name, value in data.items() if name.endswith(_PART) and isinstance(value, Mapping)]
    for part in inner if depth < _DEEPEST else ():
        yield from _parts(part, depth + 1)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 1
