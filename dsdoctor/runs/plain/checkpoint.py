"""Saves and loads checkpoints in DeepSpeed's places: `DIR/TAG/mp_rank_00_model_states.pt` and `DIR/latest`.

One file holds all, as no rank holds anything that another lacks. A checkpoint written by DeepSpeed can be read for its
weights, counters and schedule; the optimizer's state is not taken from it. Runs in rank processes only (imports torch).
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from dsdoctor.runs.plain.engine import PlainEngine

_FILE = "mp_rank_00_model_states.pt"
_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
_OWN = ("module", "optimizer", "lr_scheduler", "plain", *_COUNTERS)


def save(engine: PlainEngine, folder: str, tag: str | None, client_state: dict[str, Any], latest: bool) -> None:
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


def _state(engine: PlainEngine) -> dict[str, Any]:
    scheduler = engine.lr_scheduler
    return {
        "plain": True,
        "module": engine.module.state_dict(),
        "optimizer": None if engine.optimizer is None else engine.optimizer.state_dict(),
        "lr_scheduler": scheduler.state_dict() if hasattr(scheduler, "state_dict") else None,
        **{name: getattr(engine, name) for name in _COUNTERS},
    }


def load(
    engine: PlainEngine,
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
    _load_weights(engine, state, Path(folder), tag, strict=strict)
    if only_module:
        return str(path), {}
    if optimizer and engine.optimizer is not None:
        _load_optimizer(engine, state)
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


def _load_weights(engine: PlainEngine, state: dict[str, Any], folder: Path, tag: str, *, strict: bool) -> None:
    weights = state["module"]
    if any((folder / tag).glob("*_optim_states.pt")):
        convert = import_module("deepspeed.utils.zero_to_fp32")
        weights = convert.get_fp32_state_dict_from_zero_checkpoint(str(folder), tag)
    engine.module.load_state_dict(weights, strict=strict)
    if engine.optimizer is not None:
        engine.optimizer.refresh_fp32_params()


def _load_optimizer(engine: PlainEngine, state: dict[str, Any]) -> None:
    if not state.get("plain"):
        engine.notes.append("the checkpoint is DeepSpeed's: its optimizer state was not taken over")
    elif state["optimizer"] is not None and engine.optimizer is not None:
        engine.optimizer.load_state_dict(state["optimizer"])


def save_weights(engine: PlainEngine, folder: str, name: str) -> bool:
    """Write the model's state dict from rank 0; all ranks wait for it."""
    if engine.global_rank == 0:
        Path(folder).mkdir(parents=True, exist_ok=True)
        torch.save(engine.module.state_dict(), Path(folder) / name)
    dist.barrier()
    return True
