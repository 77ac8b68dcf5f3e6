"""By which link two ranks reach each other, as far as their nodes could say it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dsdoctor.comm.facts import CommRank
from dsdoctor.comm.members import Member
from dsdoctor.machine.interconnect import GpuLinks, Way


@dataclass(frozen=True, kw_only=True)
class Ways:
    """What is known of the links of all nodes; `gpu_links` are by host."""

    backend: str
    ranks: Sequence[CommRank]
    members: Sequence[Member] = ()
    gpu_links: Mapping[str, GpuLinks] = field(default_factory=dict)

    def between(self, low: int, high: int) -> Way | None:
        """None where nothing is known of it."""
        one, other = self.ranks[low], self.ranks[high]
        if one.host != other.host:
            return self._across(low, high)
        if self.backend == "gloo":
            return Way(name="the kernel and memory (gloo)")
        if one.gpu is None or other.gpu is None or one.host not in self.gpu_links:
            return None
        return self.gpu_links[one.host].between(one.gpu.uuid, other.gpu.uuid)

    def _across(self, low: int, high: int) -> Way | None:
        ends = [member for member in self.members if member.rank in (low, high)]
        if len(ends) != 2:
            return None
        if self.backend == "nccl" and all(end.ports for end in ends):
            cards = sorted({port for end in ends for port in end.ports})
            shown = ", ".join(cards[:2]) + (", …" if len(cards) > 2 else "")
            return Way(name=f"InfiniBand or RoCE ({shown})", best=min(max(end.ports.values()) for end in ends))
        names = dict.fromkeys(end.interface.name for end in ends)
        known = [end.interface.speed for end in ends if end.interface.speed is not None]
        return Way(name=f"TCP ({', '.join(names)})", best=min(known) if len(known) == 2 else None)
