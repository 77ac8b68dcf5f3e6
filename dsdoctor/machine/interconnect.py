"""What joins the GPUs and the node to others, and how fast by its specification: NVLink, PCIe, InfiniBand, Ethernet.

Read from nvidia-smi (`topo -m`, `nvlink -s`, `--query-gpu`) and /sys. All figures are bytes a second in one direction,
before protocol overhead. What is not known is left out; nothing here raises.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dsdoctor.machine import nvidia

QUERY = ("index", "uuid", "pcie.link.gen.max", "pcie.link.width.max", "pcie.link.width.current")
_QUESTIONS = {
    "gpus": (f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits"),
    "topology": ("topo", "-m"),
    "nvlink": ("nvlink", "-s"),
}
_SECONDS = 5.0
_LANE = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
"""Of one PCIe lane by generation, after its line code (PCI-SIG)."""
_RATE = re.compile(r"(\d+(?:\.\d+)?) Gb/sec")
_LINK = re.compile(r"\s*Link \d+: (\d+(?:\.\d+)?) GB/s")


@dataclass(frozen=True, kw_only=True)
class Way:
    """How two ranks reach each other, and what that gives at best in bytes a second; None where that is not known."""

    name: str
    best: float | None = None


@dataclass(frozen=True, kw_only=True)
class Pcie:
    """The slot of a GPU: generation and lanes that both sides can do, and the lanes that are in use."""

    generation: int
    lanes: int
    used: int

    @property
    def best(self) -> float | None:
        lane = _LANE.get(self.generation)
        return lane * self.lanes if lane else None


@dataclass(frozen=True, kw_only=True)
class GpuLinks:
    """What joins the GPUs of one node, which are known by the driver's index."""

    gpus: Mapping[str, int] = field(default_factory=dict)
    """Index by UUID."""
    ways: Mapping[tuple[int, int], str] = field(default_factory=dict)
    """`NV12`, `PIX`, `SYS`, … between two GPUs, as `nvidia-smi topo -m` names it."""
    nvlink: Mapping[int, float] = field(default_factory=dict)
    """Of one link of a GPU."""
    pcie: Mapping[int, Pcie] = field(default_factory=dict)

    def between(self, one: str, other: str) -> Way | None:
        """The way between two GPUs of this node, by their UUIDs; None where that is not known."""
        if one not in self.gpus or other not in self.gpus:
            return None
        low, high = self.gpus[one], self.gpus[other]
        way = self.ways.get((low, high), "")
        if re.fullmatch(r"NV\d+", way):
            links = [self.nvlink[gpu] for gpu in (low, high) if gpu in self.nvlink]
            return Way(name=f"NVLink ({way})", best=int(way[2:]) * min(links) if links else None)
        slots = [self.pcie[gpu] for gpu in (low, high) if gpu in self.pcie]
        bests = [slot.best for slot in slots if slot.best]
        narrow = next((slot for slot in slots if slot.used < slot.lanes), None)
        lanes = f", {narrow.used} of {narrow.lanes} lanes in use" if narrow is not None else ""
        return Way(name=f"PCIe ({way or '?'}{lanes})", best=min(bests) if len(bests) == 2 else None)


def ask(command: nvidia.Command = nvidia.run, which: Callable[[str], str | None] = shutil.which) -> dict[str, str]:
    """What nvidia-smi prints of this node, by the name of what was asked; empty where it cannot say it."""
    program = which("nvidia-smi")
    if program is None:
        return {}
    told = {}
    for name, arguments in _QUESTIONS.items():
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            code, output = command([program, *arguments], _SECONDS)
            told[name] = output if code == 0 else ""
    return told


def parse(told: Mapping[str, str]) -> GpuLinks:
    """What `ask` brought."""
    gpus, pcie = parse_gpus(told.get("gpus", ""))
    ways, nvlink = parse_topology(told.get("topology", "")), parse_nvlink(told.get("nvlink", ""))
    return GpuLinks(gpus=gpus, pcie=pcie, ways=ways, nvlink=nvlink)


def parse_gpus(output: str) -> tuple[dict[str, int], dict[int, Pcie]]:
    """Indices and slots out of the CSV that `QUERY` gives.

    >>> parse_gpus("0, GPU-1f, 4, 16, 8")[1][0].used
    8
    """
    gpus, pcie = {}, {}
    for line in output.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == len(QUERY) and cells[0].isdigit():
            index = int(cells[0])
            gpus[cells[1].removeprefix("GPU-")] = index
            if all(cell.isdigit() for cell in cells[2:]):
                generation, lanes, used = map(int, cells[2:])
                pcie[index] = Pcie(generation=generation, lanes=lanes, used=used)
    return gpus, pcie


def parse_topology(output: str) -> dict[tuple[int, int], str]:
    """The way between each two GPUs, from the matrix of `nvidia-smi topo -m`; its other columns are left out."""
    lines = [re.sub(r"\x1b\[\d*m", "", line).split() for line in output.splitlines()]
    head = next((cells for cells in lines if cells[:1] == ["GPU0"]), [])
    count = sum(1 for cell in head if re.fullmatch(r"GPU\d+", cell))
    ways: dict[tuple[int, int], str] = {}
    for cells in lines:
        if cells and re.fullmatch(r"GPU\d+", cells[0]) and cells is not head and len(cells) > count:
            row = int(cells[0][3:])
            ways |= {(row, column): cells[column + 1] for column in range(count) if column != row}
    return ways


def parse_nvlink(output: str) -> dict[int, float]:
    """Bytes a second of one active link, by GPU, from `nvidia-smi nvlink -s`."""
    speeds: dict[int, float] = {}
    gpu = -1
    for line in output.splitlines():
        if (begins := re.match(r"GPU (\d+):", line)) is not None:
            gpu = int(begins[1])
        elif (link := _LINK.match(line)) is not None and float(link[1]):
            speeds.setdefault(gpu, float(link[1]) * 1e9)
    return speeds


def ports(cards: Path = Path("/sys/class/infiniband")) -> dict[str, float]:
    """Bytes a second by port of a card, `mlx5_0:1`, of those that are active."""
    found = {}
    for port in sorted(cards.glob("*/ports/*")):
        with contextlib.suppress(OSError):
            rate = _RATE.match((port / "rate").read_text())
            if rate and "ACTIVE" in (port / "state").read_text():
                found[f"{port.parent.parent.name}:{port.name}"] = float(rate[1]) * 1e9 / 8
    return found


def ethernet(name: str, devices: Path = Path("/sys/class/net")) -> float | None:
    """Bytes a second of a network interface by its name; None where the kernel does not know it.

    Virtual interfaces make up a figure (veth says 10 Gb/s), so only those with a device, and bonds of such, count.
    """
    place = devices / name
    if not name or not ((place / "device").exists() or (place / "bonding").exists()):
        return None
    with contextlib.suppress(OSError, ValueError):
        megabits = int((place / "speed").read_text())
        return megabits * 1e6 / 8 if megabits > 0 else None
    return None
