"""Joins the process group and finds this rank's device. Runs in rank processes only (imports torch)."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib import import_module

import torch
import torch.distributed as dist


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where this process stands among the ranks. `notes` says what could not be set up."""

    device: torch.device
    local_rank: int
    rank: int
    world_size: int
    notes: tuple[str, ...] = ()


def join() -> Place:
    """Initialise torch.distributed where the script has not, and bind the device of LOCAL_RANK.

    The launcher's variables (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT) are used as they are. `deepspeed.accelerator`
    is asked only for names, so that the script and the plain engine mean the same device.
    """
    accelerator = import_module("deepspeed.accelerator").get_accelerator()
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    backend = accelerator.communication_backend_name()
    accelerator.set_device(local_rank)
    if not dist.is_initialized():
        dist.init_process_group(backend)
    return Place(
        device=torch.device(accelerator.device_name(local_rank)),
        local_rank=local_rank,
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        notes=_open_deepspeed_comm(backend),
    )


def _open_deepspeed_comm(backend: str) -> tuple[str, ...]:
    """Let `deepspeed.comm` functions that the script itself calls find the same process group."""
    comm = import_module("deepspeed.comm")
    if comm.is_initialized():
        return ()
    try:
        comm.init_distributed(dist_backend=backend, verbose=False)
    except Exception as error:
        return (f"deepspeed.comm could not be set up for the script's own use: {error}",)
    return ()
