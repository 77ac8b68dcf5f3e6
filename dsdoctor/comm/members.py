"""Who takes part in a check that a launcher started on every node: one `Member` a rank, as it introduced itself.

Plain data, no torch. What a member says of itself is taken down before any rank's process does anything, so that what
differs between the nodes is known even where the ranks never meet.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from dsdoctor.comm.interfaces import Interface
from dsdoctor.comm.started import Started
from dsdoctor.machine import interconnect
from dsdoctor.machine.versions import installed_of

_VERSIONS_OF = ("torch", "deepspeed", "transformers", "accelerate", "numpy", "nvidia-nccl-cu12", "nvidia-nccl-cu13")


@dataclass(frozen=True, kw_only=True)
class Member:
    """One rank of a started check.

    `interface` is the one that the ranks of its node will use, `port` where a leader of a node listens on it for the
    test of links, `route` the one that the way to the master goes out from. `master` are the addresses that the
    master's name resolves to there. `config_hash` is empty without a ds_config. `ports` are the active ones of its
    node's InfiniBand or RoCE cards that NCCL may use, in bytes a second. `devices` is the number of GPUs that
    torch sees there, None where none is wanted. `clock` is its clock minus rank 0's in seconds, None where it was not
    heard; good to a tenth.
    """

    rank: int
    local_rank: int
    world_size: int
    host: str
    launcher: str
    master: tuple[str, ...] = ()
    interface: Interface = field(default_factory=Interface)
    route: Interface = field(default_factory=Interface)
    port: int | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    config_hash: str = ""
    ports: Mapping[str, float] = field(default_factory=dict)
    devices: int | None = None
    clock: float | None = None

    @property
    def address(self) -> str:
        """Where the others try to connect to; empty where its interface has no address."""
        return self.interface.addresses[0] if self.interface.addresses else ""

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Member:
        """From JSON."""
        network = {name: _interface(values[name]) for name in ("interface", "route")}
        return cls(**{**values, **network, "master": tuple(values["master"])})

    def write(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class OddOneOut:
    """A thing in which ranks differ: `usual` is what most have (the lowest rank's where none prevails)."""

    what: str
    usual: str
    ranks: tuple[int, ...]
    """Those that have something else."""
    values: tuple[str, ...]
    """What they have, in the order of `ranks`."""


def versions() -> dict[str, str]:
    """Python, the libraries that ranks must have alike, and the driver, without importing any.

    Where torch is imported already, also the CUDA and the NCCL that it was built with.
    """
    found = {"python": ".".join(map(str, sys.version_info[:3])), **installed_of(_VERSIONS_OF), **_built_with()}
    driver = _nvidia_driver()
    return found | ({"nvidia driver": driver} if driver else {})


def config_hash(config: Mapping[str, Any]) -> str:
    """Twelve hex digits that are equal for equal contents, whatever the layout of the file; empty for no config."""
    if not config:
        return ""
    text = json.dumps(config, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def introduce(place: Started, *, config: Mapping[str, Any], master: tuple[str, ...], **more: Any) -> Member:
    """This process's own entry; `more` are `interface`, `route` and `devices`."""
    return Member(
        rank=place.rank,
        local_rank=place.local_rank,
        world_size=place.world_size,
        host=socket.gethostname(),
        launcher=place.launcher,
        master=master,
        versions=versions(),
        config_hash=config_hash(config),
        ports=interconnect.ports() if os.environ.get("NCCL_IB_DISABLE", "0") in ("", "0") else {},
        **more,
    )


def odd_ones_out(members: Sequence[Member]) -> tuple[OddOneOut, ...]:
    """Versions and ds_config that are not the same on all ranks."""
    names = dict.fromkeys(name for member in members for name in member.versions)
    tables = {name: {m.rank: m.versions.get(name, "none") for m in members} for name in names}
    if any(member.config_hash for member in members):
        tables["ds_config"] = {m.rank: m.config_hash or "none" for m in members}
    return tuple(odd for what, table in tables.items() if (odd := _odd(what, table)) is not None)


def world_sizes(members: Sequence[Member]) -> OddOneOut | None:
    """The ranks that were told another world size than most, None where all agree."""
    return _odd("world size", {member.rank: str(member.world_size) for member in members})


def twice(members: Sequence[Member]) -> tuple[Member, ...]:
    """Those who claim a rank that another one claims too."""
    count = Counter(member.rank for member in members)
    return tuple(member for member in members if count[member.rank] > 1)


def leaders(members: Sequence[Member]) -> list[Member]:
    """Those that lead their nodes."""
    return [member for member in members if member.local_rank == 0]


def hosts(members: Sequence[Member]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(member.host for member in members))


def _interface(values: Mapping[str, Any]) -> Interface:
    return Interface(**{**values, "addresses": tuple(values["addresses"])})


def _odd(what: str, table: Mapping[int, str]) -> OddOneOut | None:
    count = Counter(table[rank] for rank in sorted(table))
    if len(count) < 2:
        return None
    usual = count.most_common(1)[0][0]
    ranks = tuple(rank for rank in sorted(table) if table[rank] != usual)
    return OddOneOut(what=what, usual=usual, ranks=ranks, values=tuple(table[rank] for rank in ranks))


def _built_with() -> dict[str, str]:
    torch = sys.modules.get("torch")
    if torch is None or not torch.version.cuda:
        return {}
    with contextlib.suppress(Exception):  # a build with CUDA and without NCCL
        return {"cuda": torch.version.cuda, "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
    return {"cuda": torch.version.cuda}


def _nvidia_driver() -> str:
    """The version that the kernel module tells, empty without one."""
    try:
        with open("/proc/driver/nvidia/version", encoding="utf-8", errors="replace") as file:
            words = file.readline().split()
    except OSError:
        return ""
    return next((word for word in words if word[:1].isdigit() and "." in word), "")
