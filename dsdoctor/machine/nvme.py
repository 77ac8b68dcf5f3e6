"""Where the ds_config swaps to: whether DeepSpeed can make its folder there, and on what it lies."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dsdoctor.machine.facts import SwapFolder
from dsdoctor.machine.ops import offload_device, section

_MOUNTS = Path("/proc/self/mounts")


def folders(config: Mapping[str, Any] | None, mounts: Path = _MOUNTS) -> dict[str, Any]:
    """The facts of every `nvme_path` that the config uses."""
    table = _mount_table(mounts)
    return {"swap_folders": tuple(_folder(key, Path(path), table) for key, path in _named(config or {}))}


def _named(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    zero = section(config, "zero_optimization")
    for part in ("offload_optimizer", "offload_param"):
        path = section(zero, part).get("nvme_path")
        used = zero.get("stage") == 3 and offload_device(config, part) == "nvme"
        if used and isinstance(path, str) and path:
            yield f"zero_optimization.{part}.nvme_path", path


def _folder(key: str, path: Path, mounts: Mapping[str, str]) -> SwapFolder:
    """DeepSpeed makes missing folders, so that the nearest existing one counts."""
    absolute = Path(os.path.abspath(path))
    existing = next(parent for parent in (absolute, *absolute.parents) if parent.exists())
    return SwapFolder(
        key=key,
        path=str(path),
        exists=existing == absolute,
        usable=existing.is_dir() and os.access(existing, os.W_OK | os.X_OK),
        file_system=_file_system(existing.resolve(), mounts),
        free_bytes=shutil.disk_usage(existing).free,
    )


def _mount_table(mounts: Path) -> dict[str, str]:
    """Mount points with their file systems, the later of two on the same point; empty where Linux does not say."""
    try:
        lines = mounts.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return {}
    fields = [line.split(" ") for line in lines if line.count(" ") >= 3]
    return {point.replace("\\040", " "): kind for _device, point, kind, *_rest in fields}


def _file_system(folder: Path, mounts: Mapping[str, str]) -> str | None:
    points = (str(parent) for parent in (folder, *folder.parents))
    return next((mounts[point] for point in points if point in mounts), None)
