"""What the NVIDIA driver says of its GPUs, through `nvidia-smi`: present even where torch sees none of them."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from typing import Any

from dsdoctor.machine.facts import Device, GpuProcess

QUERY = ("index", "uuid", "name", "memory.total", "memory.free", "driver_version", "compute_cap")
PROCESSES = ("gpu_uuid", "pid", "process_name", "used_memory")
_MIB = 1 << 20

Command = Callable[[list[str], float], tuple[int, str]]


def run(command: list[str], timeout: float) -> tuple[int, str]:
    """Return code and output of a command. Raises OSError, subprocess.TimeoutExpired."""
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout, check=False
    )
    return done.returncode, done.stdout


def gpus(command: Command = run, which: Callable[[str], str | None] = shutil.which) -> dict[str, Any]:
    """The driver's devices and version; nothing where `nvidia-smi` is not installed. Raises where it fails."""
    program = which("nvidia-smi")
    if program is None:
        return {}
    code, output = command([program, f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits"], 20)
    if code != 0:
        raise RuntimeError(f"nvidia-smi ended with {code}: {' '.join(output.split())[:300]}")
    devices, driver = parse(output)
    return {"driver_devices": devices, "versions": {"driver": driver} if driver else {}}


def processes(command: Command = run, which: Callable[[str], str | None] = shutil.which) -> dict[str, Any]:
    """What computes on the GPUs now, whoever started it; nothing without `nvidia-smi`. Raises where it fails."""
    program = which("nvidia-smi")
    if program is None:
        return {}
    code, output = command(
        [program, f"--query-compute-apps={','.join(PROCESSES)}", "--format=csv,noheader,nounits"], 20
    )
    if code != 0:
        raise RuntimeError(f"nvidia-smi ended with {code}: {' '.join(output.split())[:300]}")
    return {"gpu_processes": parse_processes(output)}


def parse_processes(output: str) -> tuple[GpuProcess, ...]:
    """Processes out of the CSV that `PROCESSES` gives; a container sees no memory of others: `[N/A]`.

    >>> parse_processes("GPU-1f, 4711, python, train.py, 512")[0].name
    'python, train.py'
    """
    found = []
    for line in output.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) >= len(PROCESSES) and cells[1].isdigit():
            uuid, pid, *name, used = cells
            found.append(
                GpuProcess(uuid=uuid.removeprefix("GPU-"), pid=int(pid), name=", ".join(name), used_bytes=_mib(used))
            )
    return tuple(found)


def parse(output: str) -> tuple[tuple[Device, ...], str]:
    """Devices and driver version out of the CSV that `QUERY` gives.

    >>> parse("0, GPU-1f, NVIDIA A100-SXM4-80GB, 81920, 81000, 550.54.15, 8.0")[0][0].capability
    (8, 0)
    """
    devices, driver = [], ""
    for line in output.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != len(QUERY) or not cells[0].isdigit():
            continue
        index, uuid, name, total, free, driver, capability = cells
        devices.append(
            Device(
                index=int(index),
                uuid=uuid.removeprefix("GPU-"),
                name=name,
                total_bytes=_mib(total),
                free_bytes=_mib(free),
                capability=_capability(capability),
            )
        )
    return tuple(devices), driver


def _mib(cell: str) -> int | None:
    return int(cell) * _MIB if cell.isdigit() else None


def _capability(cell: str) -> tuple[int, int] | None:
    major, _, minor = cell.partition(".")
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None
