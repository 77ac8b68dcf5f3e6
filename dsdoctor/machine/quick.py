"""What this machine offers a new job, found out in milliseconds: neither torch nor DeepSpeed is imported."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dsdoctor.machine import host, nvidia, nvme
from dsdoctor.machine.collect import Probe, gather
from dsdoctor.machine.facts import Disk, MachineFacts
from dsdoctor.machine.versions import installed


def here(config: Mapping[str, Any], *, save_dir: str | None = None) -> MachineFacts:
    """Memory, limits, GPUs that the driver lists, the folders that the config swaps to, and room for checkpoints."""
    probes: list[Probe] = [
        ("memory", host.memory),
        ("control group", host.control_group),
        ("/dev/shm", host.shared_memory),
        ("limits", host.limits),
        ("nvme_path", lambda: nvme.folders(config)),
        ("nvidia-smi", nvidia.gpus),
        ("disks", lambda: room_in(save_dir)),
    ]
    found = gather(probes)
    return replace(found, devices=found.driver_devices)


def room_in(folder: str | None) -> dict[str, Any]:
    """Free space for a folder; one that is not there yet will lie on the disk of the nearest folder above it."""
    if folder is None:
        return {}
    absolute = Path(folder).absolute()
    existing = next(parent for parent in (absolute, *absolute.parents) if parent.exists())
    usage = shutil.disk_usage(existing)
    return {"disks": (Disk(path=folder, free_bytes=usage.free, total_bytes=usage.total),)}


def with_release(machine: MachineFacts, release: str | None) -> MachineFacts:
    """The machine with a DeepSpeed release, by default the installed one, where there is one."""
    if release is None:
        release = installed("deepspeed")
    if release is None:
        return machine
    return replace(machine, versions={**machine.versions, "deepspeed": release})
