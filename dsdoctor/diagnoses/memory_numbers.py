"""What the numbers in messages about memory say: on the device out of CUDA's exception, on the host out of the log."""

from __future__ import annotations

import re
from dataclasses import dataclass

from dsdoctor.finding import Evidence
from dsdoctor.logs.facts import LogEvent, LogFacts
from dsdoctor.units import size

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40, "P": 2**50, "E": 2**60}
_AMOUNT = r"(?P<{name}>[\d.]+ ?[KMGTPE]?i?B|[\d.]+ bytes)"
_PARTS = {
    "asked": (rf"Tried to allocate {_AMOUNT}",),
    "total": (rf"total capac?i?ty of {_AMOUNT}", rf"{_AMOUNT} total capacity"),
    "free": (rf"of which {_AMOUNT} is free", rf"{_AMOUNT} free"),
    "in_use": (rf"this process has {_AMOUNT} memory in use",),
    "allocated": (rf"{_AMOUNT} is allocated by PyTorch", rf"{_AMOUNT} already allocated"),
    "unused": (rf"{_AMOUNT} is reserved by PyTorch but unallocated", rf"{_AMOUNT} cached\)"),
    "reserved": (rf"{_AMOUNT} reserved in total by PyTorch",),
}
_OTHERS = 0.05
"""Share of the device that other processes may hold without being worth a word."""
_TIGHT = 0.85
"""Share of the free host memory above which the sum does not fit in practice."""
STATE_BYTES = 16
"""Bytes an element that offloading puts on the host: fp32 weight and two moments of Adam, a gradient, and copies."""


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """The figures of an out-of-memory message in bytes, None where it does not tell."""

    asked: float | None = None
    total: float | None = None
    free: float | None = None
    in_use: float | None = None
    allocated: float | None = None
    unused: float | None = None
    """Reserved by PyTorch's allocator and not allocated."""

    @property
    def fragmented(self) -> bool:
        """True if what lies reserved and unused would have been enough, in one piece."""
        return self.asked is not None and self.unused is not None and self.unused >= self.asked

    @property
    def others(self) -> float | None:
        """Bytes that other processes hold, None if unknown or next to nothing."""
        if self.total is None or self.free is None or self.in_use is None:
            return None
        held = self.total - self.free - self.in_use
        return held if held > _OTHERS * self.total else None

    def told(self) -> str:
        """The figures as a part of a sentence, "" where there are none."""
        if self.asked is None:
            return ""
        room = f" with {size(int(self.free))} free" if self.free is not None else ""
        whole = f" of {size(int(self.total))}" if self.total is not None and room else ""
        text = f"{size(int(self.asked))} were asked for{room}{whole}"
        if self.fragmented and self.unused is not None:
            text += f", while {size(int(self.unused))} lie reserved and unused: fragmentation"
        if self.others is not None:
            text += f"; other processes hold {size(int(self.others))} of the device"
        return text


def device_memory(message: str) -> DeviceMemory:
    """Read the message of CUDA's out-of-memory exception, of old and new releases of torch."""
    found = {name: _first(message, patterns, name) for name, patterns in _PARTS.items()}
    reserved = found.pop("reserved")
    if found["unused"] is None and reserved is not None and found["allocated"] is not None:
        found["unused"] = max(0.0, reserved - found["allocated"])
    return DeviceMemory(**found)


def _first(message: str, patterns: tuple[str, ...], name: str) -> float | None:
    for pattern in patterns:
        match = re.search(pattern.format(name=name), message)
        if match is not None:
            return _bytes(match[name])
    return None


def _bytes(text: str) -> float:
    number = re.match(r"\d+(?:\.\d+)?", text)
    prefix = text[number.end() :].strip()[:1] if number is not None else ""
    return float(number.group()) * _UNITS.get(prefix, 1) if number is not None else 0.0


@dataclass(frozen=True, kw_only=True)
class HostSum:
    """What offloaded states need on the host against what it has, in bytes, with the lines that say so."""

    need: float
    total: float
    used: float
    elements: int
    ranks: int
    evidence: tuple[Evidence, ...]

    @property
    def tight(self) -> bool:
        """True if hardly anything is left. Buffers are rounded up and copied on top of the sum."""
        return self.need > _TIGHT * (self.total - self.used)

    def told(self) -> str:
        return (
            f"the optimizer states of {self.elements:,} elements on {self.ranks} rank(s) need about "
            f"{size(int(self.need))} ({STATE_BYTES} bytes each), and the host has {size(int(self.total))}, of which "
            f"{size(int(self.used))} were in use"
        )


def host_sum(logs: LogFacts) -> HostSum | None:
    """The sum that DeepSpeed's own lines allow: partition sizes, offloading, and the host's memory in use."""
    parts = next(iter(logs.of_kind("partition-sizes")), None)
    memory = list(logs.of_kind("host-memory"))
    if parts is None or not memory or not any(logs.of_kind("cpu-adam")):
        return None
    last = max(memory, key=lambda event: event.order)
    used, percent = _gib(last, "used"), float(last.fields["percent"])
    if percent <= 0:
        return None
    elements = sum(map(int, re.findall(r"\((\d+),", parts.fields["sizes"])))
    ranks = int(parts.fields["ranks"])
    return HostSum(
        need=float(elements) * ranks * STATE_BYTES,
        total=used / percent * 100,
        used=used,
        elements=elements * ranks,
        ranks=ranks,
        evidence=(parts.evidence(), last.evidence()),
    )


def _gib(event: LogEvent, name: str) -> float:
    return float(event.fields[name]) * 2**30
