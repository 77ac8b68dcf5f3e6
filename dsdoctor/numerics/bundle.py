"""A folder that holds one micro-batch with all that its forward depends on, to run it again later. Rank processes only.

    bundle.json   what was found, the script and its arguments, versions
    ds_config.json  the config that was in force
    batch.pt      inputs, gradients of the outputs, random state, autocast
    weights.pt    parameters and buffers, where this rank holds them all and they are not too large

The `.pt` files hold plain tensors, numbers and containers only and are read with `weights_only=True`: nothing in them
can run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from dsdoctor.numerics import trees
from dsdoctor.numerics.again import Batch
from dsdoctor.numerics.calls import versions
from dsdoctor.numerics.engines import is_whole
from dsdoctor.numerics.replay import RandomState

LARGEST = 4 << 30
"""Bytes of weights up to which they are put into the bundle."""
_PLAIN = (Tensor, bool, int, float, complex, str, bytes, type(None))


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """What was read from a bundle's folder. `weights` is empty where they were not kept."""

    about: Mapping[str, Any]
    batch: Batch
    gradients: Mapping[str, Tensor]
    weights: Mapping[str, Tensor]


def save(
    folder: Path, model: nn.Module, batch: Batch, gradients: Mapping[str, Tensor], about: Mapping[str, Any]
) -> Path:
    """Write the bundle below `folder` and return its path. `about` goes into bundle.json and names the rank.

    Raises OSError, ValueError for odd arguments.
    """
    if not all(isinstance(leaf, _PLAIN) for leaf in tree_leaves((batch.args, dict(batch.kwargs)))):
        raise ValueError("an argument of the model is no plain value")
    place = folder / f"bundle-rank{about['rank']}"
    place.mkdir(parents=True, exist_ok=True)
    values = {
        "args": list(_plain(batch.args)),
        "kwargs": dict(_plain(batch.kwargs)),
        "gradients": _plain(dict(gradients)),
        "random": [batch.random.cpu, batch.random.cuda],
        "autocast": [batch.autocast[0], str(batch.autocast[1])] if batch.autocast is not None else None,
        "number": batch.number,
        "micro_step": batch.micro_step,
    }
    torch.save(values, place / "batch.pt")
    kept = _weights(model)
    if kept is not None:
        torch.save(kept, place / "weights.pt")
    about = {**about, "torch": torch.__version__, "weights": kept is not None}
    config = about.get("order", {}).get("config", {})
    (place / "ds_config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    (place / "bundle.json").write_text(json.dumps(about, indent=1, default=str), encoding="utf-8")
    return place


def load(place: Path) -> Bundle:
    """Read a bundle. Raises OSError, ValueError or torch's UnpicklingError for what is none."""
    about = json.loads((place / "bundle.json").read_text(encoding="utf-8"))
    values = torch.load(place / "batch.pt", map_location="cpu", weights_only=True)
    weights = place / "weights.pt"
    args, kwargs = tuple(values["args"]), values["kwargs"]
    autocast = values["autocast"]
    return Bundle(
        about=about,
        batch=Batch(
            number=values["number"],
            micro_step=values["micro_step"],
            args=args,
            kwargs=kwargs,
            versions=tuple(versions([t for _, t in trees.arguments(args, kwargs) if isinstance(t, Tensor)])),
            random=RandomState(*values["random"]),
            autocast=(autocast[0], getattr(torch, autocast[1].removeprefix("torch."))) if autocast else None,
        ),
        gradients=values["gradients"],
        weights=torch.load(weights, map_location="cpu", weights_only=True) if weights.is_file() else {},
    )


def _weights(model: nn.Module) -> dict[str, Tensor] | None:
    """Parameters and buffers on the host, None where they are partitioned or too large."""
    if not is_whole(model):
        return None
    held = [*model.named_parameters(), *model.named_buffers()]
    if sum(t.numel() * t.element_size() for _, t in held) > LARGEST:
        return None
    return {name: _copy(value) for name, value in held}


def _plain(values: Any) -> Any:
    return tree_map(lambda value: _copy(value) if isinstance(value, Tensor) else value, values)


def _copy(tensor: Tensor) -> Tensor:
    """A plain tensor of its own on the host: no parameter, no view of a larger storage."""
    return torch.empty_like(tensor, device="cpu", memory_format=torch.contiguous_format).copy_(tensor.detach()).data
