"""What a job needs of each GPU and host, against what they have. Plain data, no torch. Sizes are bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

Offload = Literal["none", "cpu", "nvme"]


@dataclass(frozen=True, kw_only=True)
class Holding:
    """What is held at one moment, by category. Bytes."""

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    buffers: int = 0
    activations: int = 0
    overhead: int = 0

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))

    def plus(self, **more: int) -> Holding:
        """With that much more of some categories."""
        return Holding(**{one.name: getattr(self, one.name) + more.get(one.name, 0) for one in fields(self)})


@dataclass(frozen=True, kw_only=True)
class Moment:
    """A named point in the life of a job, and what is held then."""

    name: str
    holding: Holding


@dataclass(frozen=True, kw_only=True)
class DeviceNeed:
    """Need of one device (one rank).

    The categories, and `total`, their sum, are those of the highest moment of a steady training step (`moment`);
    `peak` is the highest of all moments, and `peak_moment` says which.
    """

    weights: int
    gradients: int
    optimizer: int
    buffers: int
    activations: int
    overhead: int
    total: int
    peak: int
    moment: str
    peak_moment: str
    moments: tuple[Moment, ...] = ()
    """All of them, in their order in time."""


@dataclass(frozen=True, kw_only=True)
class HostNeed(DeviceNeed):
    """Need of one host, all its ranks together. `init_peak` is the highest moment before the first step."""

    init_peak: int


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a row costs beside memory, of one optimizer step and one rank. Bytes; `slowdown` against the fastest row.

    `network` is sent by a rank, `pcie` crosses between GPU and host, `disk` is read and written. `seconds` is the time
    that they and the computing take by assumed rates.
    """

    network: int
    pcie: int
    disk: int
    seconds: float
    slowdown: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Need:
    """One row: what a ZeRO stage with its offloads needs. `margin` is the least share of a place that is left free."""

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
    precision: str = "fp32"
    cost: Cost | None = None
    patch: Mapping[str, Any] | None = None
    """The merge patch that leads here from the given config; None for that config itself."""


Basis = Literal["computed", "measured", "assumed"]


@dataclass(frozen=True, kw_only=True)
class Term:
    """One line of the table: where bytes of the given config go. `basis` says how far the figure can be trusted.

    `computed` follows from the config and the parameters by DeepSpeed's source and was held to real engines;
    `measured` was counted on the model; `assumed` is experience, or could not be checked without a GPU.
    """

    place: Literal["gpu", "host", "nvme"]
    name: str
    bytes: int
    basis: Basis
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """What one checkpoint takes on disk. `kept` of them have to fit; `free` is None where no folder was named."""

    bytes: int
    kept: int = 1
    folder: str | None = None
    free: int | None = None

    @property
    def needed(self) -> int:
        return self.kept * self.bytes


@dataclass(frozen=True, kw_only=True)
class Advice:
    """What would fit. `micro_batch` and `sequence` are the largest with the given config (None: activations unknown).

    `ranks` is the least number of GPUs with which some row fits, `row_micro_batch` the largest micro-batch that fits in
    some row; both only where nothing fits as it is. `checkpointing` says what would fit with activation checkpointing
    switched on: the given config, or with it some other row where nothing does as it is. `loading` says how to need
    less host memory before the first step.
    """

    micro_batch: int | None = None
    sequence: int | None = None
    ranks: int | None = None
    row_micro_batch: int | None = None
    checkpointing: Literal["given", "row"] | None = None
    loading: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class MemoryFacts:
    """The needs of all rows, and what the machine has.

    `gpu_bytes`, `host_bytes` and `nvme_bytes` are what one GPU and one host offer a new job, None where that is not
    known (then it is not judged). On the CPU accelerator (`device` "cpu") device memory is host memory: `per_gpu` is
    one rank's share of it and `per_host` holds all ranks' needs. `recommended` is the index of the cheapest row that
    fits, `patch` the merge patch of the ds_config that leads there (None where the given config is that row or none
    fits).
    """

    needs: tuple[Need, ...]
    device: Literal["cpu", "cuda"]
    parameters: int
    ranks: int
    ranks_per_host: int
    trainable: int = 0
    model: str = ""
    gpu_bytes: int | None = None
    host_bytes: int | None = None
    nvme_bytes: int | None = None
    recommended: int | None = None
    patch: Mapping[str, Any] | None = None
    terms: tuple[Term, ...] = ()
    checkpoint: Checkpoint | None = None
    advice: Advice = Advice()
    assumptions: tuple[str, ...] = ()
    """What the figures leave out or take for granted, one sentence each."""

    @property
    def current(self) -> Need | None:
        """The row of the given config."""
        return next((need for need in self.needs if need.current), None)

    def to_dict(self) -> dict[str, Any]:
        """The JSON document's `needs` and `recommended`, with what the machine has and what was assumed."""
        return asdict(self)
