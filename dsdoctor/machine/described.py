"""A machine that is not this one, from what the user says of it: `8x80GiB`, `A100-80G`, `512GiB`."""

from __future__ import annotations

import re
from dataclasses import replace

from dsdoctor.machine.facts import Device, MachineFacts, SwapFolder

_MIB = 1 << 20
KNOWN_GPUS: dict[str, int] = {
    "T4": 15360,
    "V100-16G": 16160,
    "V100-32G": 32510,
    "A10": 23028,
    "A10G": 23028,
    "L4": 23034,
    "L40S": 46068,
    "A6000": 49140,
    "RTX3090": 24576,
    "RTX4090": 24564,
    "A100-40G": 40960,
    "A100-80G": 81920,
    "H100": 81559,
    "H100-80G": 81559,
    "H200": 143771,
    "B200": 183359,
    "MI250": 65536,
    "MI300X": 196592,
}
"""Memory as the driver's tool shows it, in MiB; of an MI250 one of its two halves."""
_MANY = re.compile(r"(?:(\d+)\s*[x*×]\s*)?(.+)", re.IGNORECASE)
_MOST_GPUS = 1024


class NotUnderstood(ValueError):
    """The text describes no machine; `str()` is one line for the user."""


def gpus(text: str) -> tuple[Device, ...]:
    """GPUs of one host: a number and a size or a name, `8x80GiB`, `4xA100-80G`, `24GB`. Raises NotUnderstood.

    >>> [len(gpus(text)) for text in ("8x80GiB", "A100-80G")]
    [8, 1]
    """
    match = _MANY.fullmatch(text.strip())
    count = int(match.group(1) or 1) if match else 0
    if match is None or not 1 <= count <= _MOST_GPUS:
        raise NotUnderstood(f"{text} describes no GPUs: write 8x80GiB or 8xA100-80G")
    name = match.group(2).strip()
    memory = _named(name) or size(name)
    shown = name.upper() if _named(name) else "GPU"
    return tuple(Device(index=index, name=shown, total_bytes=memory, free_bytes=memory) for index in range(count))


def _named(name: str) -> int | None:
    plain = name.upper().replace(" ", "-").replace("_", "-").removeprefix("NVIDIA-").removesuffix("B")
    plain = plain if plain in KNOWN_GPUS else plain.replace("RTX-", "RTX")
    return KNOWN_GPUS[plain] * _MIB if plain in KNOWN_GPUS else None


def size(text: str) -> int:
    """Bytes: `80GiB` in powers of two, `80GB` in powers of ten, as the letters say. Raises NotUnderstood."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgtp])?(i)?b?", text.strip(), re.IGNORECASE)
    if match is None or (match.group(3) and not match.group(2)):
        known = ", ".join(KNOWN_GPUS)
        raise NotUnderstood(f"{text} is neither a size (80GiB, 80GB) nor a GPU that is known ({known})")
    power = " kmgtp".index((match.group(2) or " ").lower())
    value = float(match.group(1)) * (1024 if match.group(3) else 1000) ** power
    if value < _MIB and not match.group(2):
        raise NotUnderstood(f"{text} has no unit: write {match.group(1)}GiB")
    if not 1 <= value < 1 << 60:
        raise NotUnderstood(f"{text} is no size of memory")
    return int(value)


def described(
    here: MachineFacts,
    *,
    devices: tuple[Device, ...] | None = None,
    host: int | None = None,
    nvme: int | None = None,
) -> MachineFacts:
    """The machine here with what is said of another in its place; limits of this host do not hold for that one."""
    machine = here
    if devices is not None:
        machine = replace(machine, devices=devices, driver_devices=(), accelerator="cuda")
    if host is not None:
        machine = replace(machine, memory_total=host, memory_available=host, cgroup_limit=None, cgroup_used=None)
    if nvme is not None:
        folder = SwapFolder(key="--nvme", path="--nvme", exists=True, usable=True, free_bytes=nvme)
        machine = replace(machine, swap_folders=(folder,))
    return machine
