"""What a job needs of each GPU and host, against what they have. Plain data, no torch. Sizes are bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

Offload = Literal["none", "cpu", "nvme"]


@dataclass(frozen=True, kw_only=True)
class DeviceNeed:
    """Need of one device (one rank), term by term.

    `total` is the steady state at the end of backward; `peak` the highest moment, and `peak_moment` says which.
    """

    weights: int
    gradients: int
    optimizer: int
    buffers: int
    activations: int
    overhead: int
    total: int
    peak: int
    peak_moment: str


@dataclass(frozen=True, kw_only=True)
class HostNeed:
    """Need of one host, all its ranks together. `init_peak` is the highest moment before the first step."""

    weights: int
    gradients: int
    optimizer: int
    buffers: int
    activations: int
    overhead: int
    total: int
    peak: int
    init_peak: int
    peak_moment: str


@dataclass(frozen=True, kw_only=True)
class Need:
    """One row: what a ZeRO stage with its offloads needs. `margin` is the least share of GPU or host left free."""

    stage: int
    offload_optimizer: Offload
    offload_param: Offload
    per_gpu: DeviceNeed
    per_host: HostNeed
    per_nvme: int = 0
    fits: bool | None = None
    margin: float | None = None
    cost_rank: int = 0
    current: bool = False


@dataclass(frozen=True, kw_only=True)
class MemoryFacts:
    """The needs of all rows, and what the machine has.

    `gpu_bytes` and `host_bytes` are what one GPU and one host offer a new job, None where that is not known (then no
    row says whether it fits). On the CPU accelerator (`device` "cpu") device memory is host memory: `per_gpu` is one
    rank's share of it and `per_host` holds all ranks' needs. `recommended` is the index of the cheapest row that fits,
    `patch` the merge patch of the ds_config that leads there (None where the given config is that row or none fits).
    """

    needs: tuple[Need, ...]
    device: Literal["cpu", "cuda"]
    parameters: int
    ranks: int
    ranks_per_host: int
    gpu_bytes: int | None = None
    host_bytes: int | None = None
    recommended: int | None = None
    patch: Mapping[str, Any] | None = None
    assumptions: tuple[str, ...] = ()
    """What the figures leave out or take for granted, one sentence each."""

    @property
    def current(self) -> Need | None:
        """The row of the given config."""
        return next((need for need in self.needs if need.current), None)

    def to_dict(self) -> dict[str, Any]:
        """The JSON document's `needs` and `recommended`, with what the machine has and what was assumed."""
        return asdict(self)
