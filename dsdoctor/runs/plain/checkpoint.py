"""Saves and loads checkpoints in DeepSpeed's places: `DIR/TAG/mp_rank_00_model_states.pt` and `DIR/latest`.

One file holds all, as no rank holds anything that another lacks. A checkpoint written by DeepSpeed is read in full,
shards of ZeRO included (`shards`). Runs in rank processes only (imports torch).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from dsdoctor.runs.plain import shards

if TYPE_CHECKING:
    from dsdoctor.runs.plain.precision import Pair
    from dsdoctor.runs.plain.states import States
    from dsdoctor.runs.plain.stepping import PlainOptimizer

_FILE = "mp_rank_00_model_states.pt"
_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
_OWN = ("module", "optimizer", "lr_scheduler", "plain", *_COUNTERS)


def save(engine: States, folder: str, tag: str | None, client_state: dict[str, Any], latest: bool) -> None:
    """Write a checkpoint from rank 0; all ranks wait for it."""
    if not folder:
        raise ValueError("save_dir is empty")
    tag = str(tag) if tag is not None else f"global_step{engine.global_steps}"
    if engine.global_rank == 0:
        place = Path(folder) / tag
        place.mkdir(parents=True, exist_ok=True)
        torch.save({**client_state, **_state(engine)}, place / _FILE)
        if latest:
            (Path(folder) / "latest").write_text(tag, encoding="utf-8")
    dist.barrier()


def _state(engine: States) -> dict[str, Any]:
    scheduler = engine.lr_scheduler
    return {
        "plain": True,
        "module": engine.module.state_dict(),
        "optimizer": None if engine.optimizer is None else engine.optimizer.state_dict(),
        "lr_scheduler": scheduler.state_dict() if hasattr(scheduler, "state_dict") else None,
        **{name: getattr(engine, name) for name in _COUNTERS},
    }


def load(
    engine: States,
    folder: str,
    tag: str | None,
    *,
    strict: bool,
    optimizer: bool,
    scheduler: bool,
    only_module: bool,
) -> tuple[str | None, dict[str, Any] | None]:
    """Load a checkpoint; returns its path and the script's own state, or (None, None) where there is no `latest`.

    Raises:
        FileNotFoundError: the checkpoint named by the tag is not there.
    """
    latest = Path(folder) / "latest"
    if tag is None:
        if not latest.is_file():
            return None, None
        tag = latest.read_text(encoding="utf-8").strip()
    path = _model_file(Path(folder) / tag)
    # As in DeepSpeed, the script's own state may be any object, so the file is trusted as the script trusts it.
    state = torch.load(path, map_location="cpu", weights_only=False)
    spread = None if state.get("plain") else shards.read(path.parent, state.get("param_shapes") or ())
    _load_weights(engine, state, spread, strict=strict)
    if only_module:
        return str(path), {}
    if optimizer and engine.optimizer is not None:
        _load_optimizer(engine, engine.optimizer, state, spread)
    if scheduler and engine.lr_scheduler is not None and state.get("lr_scheduler"):
        engine.lr_scheduler.load_state_dict(state["lr_scheduler"])
    for name in _COUNTERS:
        setattr(engine, name, state.get(name, 0))
    return str(path), {key: value for key, value in state.items() if key not in _OWN}


def _model_file(place: Path) -> Path:
    found = [place / _FILE, *sorted(place.glob("zero_pp_rank_0_mp_rank_00_model_states.pt"))]
    for path in found:
        if path.is_file():
            return path
    raise FileNotFoundError(f"no checkpoint at {place / _FILE}")


def _load_weights(
    engine: States, state: dict[str, Any], spread: shards.OptimizerShards | None, *, strict: bool
) -> None:
    """The module's own tensors; ZeRO's fp32 weights, where they are kept, are the better ones."""
    weights = dict(state["module"] or {})
    if spread is not None:
        weights |= {**spread.masters, **_aliases(state, spread.masters)}
    engine.module.load_state_dict(weights, strict=strict)
    if engine.optimizer is not None:
        engine.optimizer.refresh_fp32_params()
    for parameter, master in _masters(engine, spread):
        parameter.copy_(master)


def _aliases(state: dict[str, Any], masters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Other names of shared parameters."""
    shared = state.get("shared_params") or {}
    return {alias: masters[name] for alias, name in shared.items() if name in masters}


def _masters(engine: States, spread: shards.OptimizerShards | None) -> Iterator[tuple[Tensor, Tensor]]:
    """The engine's fp32 masters with what the checkpoint holds for them."""
    if spread is None or engine.optimizer is None:
        return
    for name, pair in _pairs(engine, engine.optimizer):
        if name in spread.masters:
            yield pair.master.data, spread.masters[name]


def _pairs(engine: States, optimizer: PlainOptimizer) -> list[tuple[str, Pair]]:
    names: dict[Tensor, str] = {parameter: name for name, parameter in engine.module.named_parameters()}
    return [(names[pair.parameter], pair) for pair in optimizer.pairs if pair.parameter in names]


def _load_optimizer(
    engine: States, optimizer: PlainOptimizer, state: dict[str, Any], spread: shards.OptimizerShards | None
) -> None:
    if state.get("plain"):
        if state["optimizer"] is not None:
            optimizer.load_state_dict(state["optimizer"])
        return
    if spread is None:
        engine.notes.append("the checkpoint is of a run without ZeRO: its optimizer state was not taken over")
        return
    for name, pair in _pairs(engine, optimizer):
        held = spread.state.get(name)
        if held:
            optimizer.state[pair.master] = {
                key: value.to(pair.master.device) if isinstance(value, Tensor) and value.dim() else value
                for key, value in held.items()
            }
    for group, saved in zip(optimizer.param_groups, spread.groups, strict=False):
        group.update({key: value for key, value in saved.items() if key in group and key != "params"})
    optimizer.loss_scaler.take_over(spread.scaler)


def save_weights(engine: States, folder: str, name: str) -> bool:
    """Write the model's state dict from rank 0; all ranks wait for it."""
    if engine.global_rank == 0:
        Path(folder).mkdir(parents=True, exist_ok=True)
        torch.save(engine.module.state_dict(), Path(folder) / name)
    dist.barrier()
    return True
