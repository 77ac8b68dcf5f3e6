"""Reads the optimizer's part of a DeepSpeed checkpoint, which ZeRO has spread over one file a rank.

The layout is that of `deepspeed/runtime/zero/stage_1_and_2.py` and `stage3.py`: at stages 1 and 2 each parameter group
is one flat vector, cut into one piece a rank; at stage 3 each parameter is cut into one piece a rank, and each rank's
pieces lie one after the other. Files are pickles. Runs in rank processes only (imports torch).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsdoctor.runs.plain.errors import NotPlayed

Shapes = Sequence[Mapping[str, torch.Size]]
"""Names and shapes of the trained parameters, in order, for each parameter group."""


@dataclass(frozen=True, kw_only=True)
class OptimizerShards:
    """What all ranks' files hold together, by the name of the parameter.

    `masters` are the fp32 weights, `state` the optimizer's own (moments; counters as they are); `groups` the options of
    the parameter groups, `scaler` DeepSpeed's pickled loss scaler, None where there is none.
    """

    masters: Mapping[str, Tensor]
    state: Mapping[str, Mapping[str, Any]]
    groups: Sequence[Mapping[str, Any]]
    scaler: Any


def read(folder: Path, shapes: Shapes) -> OptimizerShards | None:
    """Read all ranks' files in a checkpoint's folder; None where there are none (DeepSpeed without ZeRO).

    Raises:
        NotPlayed: the files of some ranks are missing, or do not hold what the shapes need.
    """
    files = sorted(folder.glob("*_optim_states.pt"), key=_rank)
    if not files:
        return None
    states = [torch.load(file, map_location="cpu", weights_only=False)["optimizer_state_dict"] for file in files]
    count = states[0]["partition_count"]
    if (max(count) if isinstance(count, list) else count) != len(files):
        raise NotPlayed(f"the checkpoint {folder} has the optimizer states of {len(files)} of {count} ranks")
    whole = _WholeAt3(shapes) if states[0]["zero_stage"] == 3 else _Whole(shapes)
    masters = [state[whole.masters] for state in states]
    bases = [state[whole.base] for state in states]
    return OptimizerShards(
        masters=dict(whole.join(masters)),
        state=_optimizer_state(whole, bases),
        groups=bases[0]["param_groups"],
        scaler=states[0].get("loss_scaler"),
    )


def _rank(file: Path) -> int:
    found = re.search(r"zero_pp_rank_(\d+)_", file.name)
    return int(found.group(1)) if found else 0


class _Whole:
    """Joins the pieces of stages 1 and 2."""

    masters = "single_partition_of_fp32_groups"
    base = "base_optimizer_state"

    def __init__(self, shapes: Shapes) -> None:
        self.shapes = shapes

    def join(self, ranks: Sequence[Sequence[Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Name and whole tensor of each parameter, from each rank's pieces of each flat vector."""
        for number, group in enumerate(self.shapes):
            flat = torch.cat([pieces[number].reshape(-1) for pieces in ranks])
            start = 0
            for name, shape in group.items():
                yield name, _part(flat, start, shape)
                start += shape.numel()


class _WholeAt3(_Whole):
    """Joins the pieces of stage 3, whose flat vectors (sub-groups) may end within a parameter."""

    masters = "fp32_flat_groups"
    base = "optimizer_state_dict"

    def join(self, ranks: Sequence[Sequence[Tensor]]) -> Iterator[tuple[str, Tensor]]:
        flats = [torch.cat([piece.reshape(-1) for piece in pieces]) for pieces in ranks]
        start = 0
        for name, shape in ((name, shape) for group in self.shapes for name, shape in group.items()):
            length = -(-shape.numel() // len(flats))
            pieces = torch.cat([_part(flat, start, torch.Size([length])) for flat in flats])
            yield name, _part(pieces, 0, shape)
            start += length


def _part(flat: Tensor, start: int, shape: torch.Size) -> Tensor:
    end = start + shape.numel()
    if end > flat.numel():
        raise NotPlayed("the checkpoint's optimizer states are shorter than the model's parameters")
    return flat[start:end].view(shape).clone()


def _optimizer_state(whole: _Whole, bases: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The optimizer's state of each parameter; what is one number for a whole flat vector goes to all of them."""
    names = [name for group in whole.shapes for name in group]
    found: dict[str, dict[str, Any]] = {name: {} for name in names}
    entries = [[base["state"][key] for key in sorted(base["state"])] for base in bases]
    if not entries[0]:
        return found
    for key, value in entries[0][0].items():
        if isinstance(value, Tensor) and value.dim() > 0:
            for name, tensor in whole.join([[entry[key] for entry in rank] for rank in entries]):
                found[name][key] = tensor
        else:
            for name in names:
                found[name][key] = value.clone() if isinstance(value, Tensor) else value
    return found
