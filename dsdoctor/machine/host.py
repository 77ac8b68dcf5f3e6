"""Probes of the host that need no framework: processor, memory, limits, disks. Each gives fields of `MachineFacts`."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

from dsdoctor.machine import cgroup
from dsdoctor.machine.facts import Disk, Limit


def python() -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "host": socket.gethostname(),
    }


def cores() -> dict[str, Any]:
    """All logical cores, and those that this process may run on."""
    affinity = getattr(os, "sched_getaffinity", None)
    return {"cores": os.cpu_count(), "usable_cores": len(affinity(0)) if affinity else os.cpu_count()}


def memory() -> dict[str, Any]:
    """RAM and swap of the machine; a container shows its node here, its own limit is in the cgroup."""
    import psutil

    ram, swap = psutil.virtual_memory(), psutil.swap_memory()
    return {
        "memory_total": ram.total,
        "memory_available": ram.available,
        "swap_total": swap.total,
        "swap_free": swap.free,
    }


def control_group() -> dict[str, Any]:
    group = cgroup.read()
    return {
        "cgroup_version": group.version,
        "cgroup_limit": group.limit,
        "cgroup_used": group.used,
        "cgroup_swap": group.swap,
        "cpu_quota": group.cpu_quota,
    }


def shared_memory(path: Path = Path("/dev/shm")) -> dict[str, Any]:
    """The shared-memory file system, which NCCL and data-loader workers use. Raises OSError where there is none."""
    usage = shutil.disk_usage(path)
    return {"shm_total": usage.total, "shm_free": usage.free}


def limits() -> dict[str, Any]:
    """Soft limits of this process: locked memory in bytes, open files."""
    return {"memlock": _soft(resource.RLIMIT_MEMLOCK), "nofile": _soft(resource.RLIMIT_NOFILE)}


def disks(folder: Path) -> dict[str, Any]:
    """Space where the user works and where temporary files go. Raises OSError for a folder that is not there."""
    found = []
    for path in (folder, Path(tempfile.gettempdir())):
        usage = shutil.disk_usage(path)
        found.append(Disk(path=str(path), free_bytes=usage.free, total_bytes=usage.total))
    return {"disks": tuple(found)}


def _soft(name: int) -> Limit:
    soft, _ = resource.getrlimit(name)
    return "unlimited" if soft == resource.RLIM_INFINITY else soft
