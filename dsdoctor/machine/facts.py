"""What is known of one machine. Plain data, no torch.

Made by `machine.collect`. None always means "could not be found out" (why is in `not_collected`), never "zero" and
never "no limit"; a limit that is switched off says `"unlimited"`. Sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Limit = int | Literal["unlimited"] | None


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator. `free_bytes` is what was free before any of our processes used it."""

    index: int
    name: str
    uuid: str = ""
    capability: tuple[int, int] | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class GpuProcess:
    """A process that computes on the GPU with that `uuid`; `used_bytes` is None where the driver does not say it."""

    uuid: str
    pid: int
    name: str
    used_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class OpBuild:
    """A compiled DeepSpeed op that the given config uses.

    `needed_by` is the ds_config key (or the accelerator) that asks for it; `compatible` is what the op's builder says
    of this machine, `installed` that it was built ahead of time. `missing` names the tools that a build on first use
    needs and that are not there (`ninja`, `g++`); `problem` is what the builder printed, or the error it raised.
    """

    name: str
    needed_by: str
    compatible: bool | None
    implemented: bool = True
    """False where the accelerator has no such op at all."""
    installed: bool = False
    missing: tuple[str, ...] = ()
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class Disk:
    """Free and total space of the file system that holds `path`."""

    path: str
    free_bytes: int
    total_bytes: int


@dataclass(frozen=True, kw_only=True)
class SwapFolder:
    """An `nvme_path` that the config uses, by its dotted `key`.

    `usable` says that it, or where it does not exist the nearest folder above it, can be written in; `file_system` is
    the type of the mount, None where that is not known.
    """

    key: str
    path: str
    exists: bool
    usable: bool
    file_system: str | None = None
    free_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class NotCollected:
    """A probe that gave nothing, and why."""

    probe: str
    why: str


@dataclass(frozen=True, kw_only=True)
class MachineFacts:
    """One machine, as the user's Python sees it.

    `versions` maps distribution or component names (torch, deepspeed, transformers, accelerate, lightning, cuda, nccl,
    driver, ...) to version strings; an absent one is missing. `cuda` there is the toolkit that torch was built for.
    `devices` are those that torch sees; `driver_devices` those that the NVIDIA driver lists, visible or not.
    `environment` holds variables that matter; values outside a whitelist are shown as `"(set)"`.
    """

    python: str = ""
    executable: str = ""
    platform: str = ""
    host: str = ""
    cores: int | None = None
    usable_cores: int | None = None
    cpu_quota: float | None = None
    """Cores that the cgroup's CPU quota allows, None where there is no quota."""
    memory_total: int | None = None
    memory_available: int | None = None
    swap_total: int | None = None
    swap_free: int | None = None
    cgroup_version: int | None = None
    cgroup_limit: Limit = None
    cgroup_used: int | None = None
    """What counts against `cgroup_limit` and cannot be dropped (page cache that the kernel can drop is left out)."""
    cgroup_swap: Limit = None
    shm_total: int | None = None
    shm_free: int | None = None
    memlock: Limit = None
    nofile: Limit = None
    disks: tuple[Disk, ...] = ()
    swap_folders: tuple[SwapFolder, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    accelerator: str | None = None
    backend: str | None = None
    devices: tuple[Device, ...] = ()
    driver_devices: tuple[Device, ...] = ()
    gpu_processes: tuple[GpuProcess, ...] = ()
    """Those that were there before any of ours."""
    bf16: bool | None = None
    fp16: bool | None = None
    """Whether DeepSpeed's accelerator takes that precision here."""
    ops: tuple[OpBuild, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    not_collected: tuple[NotCollected, ...] = ()

    @property
    def host_available(self) -> int | None:
        """Host memory that new processes can get: the least of what is free and what the cgroup still allows."""
        room = [self.memory_available] if self.memory_available is not None else []
        if isinstance(self.cgroup_limit, int):
            room.append(max(0, self.cgroup_limit - (self.cgroup_used or 0)))
        return min(room, default=None)

    def to_dict(self) -> dict[str, Any]:
        """The JSON document's `environment`."""
        return asdict(self)
