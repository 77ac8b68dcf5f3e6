"""What NCCL says of itself with NCCL_DEBUG=INFO: the network and the way that it chose, and why not another.

Texts are those of NCCL 2.8 to 2.30 (transport/p2p.cc, shm.cc, net_ib, net_socket, graph/paths.cc, misc/param.cc).
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsdoctor.logs.source import Unreadable, blocks, find

NCCL_LOG = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET,GRAPH,ENV"}
"""Variables with which NCCL says all that is read here."""
_LINE = re.compile(rb"NCCL (?:INFO|WARN|DIAG) [^\r\n]*|NCCL version [^\s\r\n]+")
_MOST = 1000
"""Different values of a kind that are kept; a log of ten thousand ranks names no more than some hundred."""
_SHOWN = 8

_VERSION = re.compile(r"NCCL version (\d[\w.+-]*)")
_NETWORK = re.compile(r"Using network (.+)")
_SOCKETS = re.compile(r"(?:NET/Socket|Bootstrap) ?: Using (.+)")
_INTERFACE = re.compile(r"(?:\[\d+\])?([\w.@-]+):\S+<\d+>")
_CARDS = re.compile(r"NET/IB ?: Using (\[0\].+?)(?: ?; OOB|$)")
_CHANNEL = re.compile(r"Channel \d+(?:/\d+)? : (\d+)\[\w+\] -> (\d+)\[\w+\] (?:\[(send|receive)\] )?via (\S+)")
_SET = re.compile(r"(NCCL_\w+) set by environment to (.+?)\.?$")
_NOT = re.compile(
    r"P2P is disabled between connected GPUs.*?(?=\. |$)|Could not enable P2P between dev.*|NET/IB ?: No device found"
    r"|GPU Direct RDMA Disabled for .*|Failed to open libibverbs\S*|NET/Plugin ?: (?:Could not find|Failed to load).*"
    r"|Failed to initialize NET plugin \S+"
)
_ADDRESSES = re.compile(r"0x[0-9a-f]+|(?<=<)\d+(?=>)")

MEANINGS = (
    (r"disabled between NVLINK", "NVLink is broken or the fabric manager does not run: nvidia-smi nvlink -s, dmesg"),
    (r"Duplicate GPU detected", "two ranks use one GPU: each has to bind to the one of its LOCAL_RANK"),
    (r"[Mm]ismatch\w* .*version|version mismatch", "the ranks have different releases of NCCL"),
    (
        r"Got completion",
        "an InfiniBand transfer failed; status 12: the other side did not answer, 5: it had gone before",
    ),
    (r"Call to ibv_", "a call of the InfiniBand library failed: locked memory (ulimit -l), /dev/infiniband, GID index"),
    (r"posix_fallocate|shared memory|/dev/shm", "/dev/shm is too small: --shm-size or --ipc=host for a container"),
    (r"no socket interface found", "no interface fits NCCL_SOCKET_IFNAME"),
    (r"[Cc]onnect to .* failed|Call to connect", "a connection did not come about: interface, route or firewall"),
    (r"[Cc]onnection closed by remote peer|Connection reset", "the other rank's process has ended: read its log"),
    (r"peer access|CUDA IPC", "the GPUs cannot reach each other directly: NCCL_P2P_DISABLE=1 as a test, IOMMU and ACS"),
    (r"Message truncated", "the ranks call with different sizes"),
    (r"Cuda failure", "a CUDA call failed inside NCCL; the reason is CUDA's own"),
)
"""What a warning means, by its text."""


@dataclass(frozen=True, kw_only=True)
class NcclOutput:
    """Where it stands what NCCL said during a check: a folder of its logs, and what its diagnostics printed."""

    logs: Path | None = None
    printed: Path | None = None


@dataclass(kw_only=True)
class NcclSummary:
    """Counted over all lines that were fed. `channels` are by transport, pair of ranks and end: both
    ends of a channel over the network name it, once to send and once to receive. `warnings` are by their text."""

    versions: Counter[str] = field(default_factory=Counter)
    networks: Counter[str] = field(default_factory=Counter)
    interfaces: Counter[str] = field(default_factory=Counter)
    cards: Counter[str] = field(default_factory=Counter)
    channels: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    settings: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    warnings: Counter[str] = field(default_factory=Counter)
    diagnostics: Counter[str] = field(default_factory=Counter)

    def feed(self, block: bytes) -> None:
        """Whole lines of a log; those that are not NCCL's are passed over."""
        for match in _LINE.finditer(block):
            kind, _, text = match[0].decode("utf-8", "replace").removeprefix("NCCL ").partition(" ")
            if kind == "version":
                _count(self.versions, text)
            elif kind == "WARN":
                _count(self.warnings, _ADDRESSES.sub("…", text.strip()))
            elif kind == "DIAG":
                _count(self.diagnostics, text.strip())
            else:
                self._learn(text.strip())

    def _learn(self, text: str) -> None:
        if (found := _CHANNEL.search(text)) is not None:
            _count(self.channels, (_transport(found[4]), f"{found[1]}-{found[2]}", found[3] or ""))
        elif (found := _SET.search(text)) is not None:
            _count(self.settings, f"{found[1]}={found[2]}")
        elif (found := _NETWORK.match(text)) is not None:
            _count(self.networks, found[1])
        elif (found := _SOCKETS.match(text)) is not None:
            for name in _INTERFACE.findall(found[1]):
                _count(self.interfaces, name)
        elif (found := _CARDS.match(text)) is not None:
            _count(self.cards, found[1])
        elif (found := _NOT.search(text)) is not None:
            _count(self.reasons, found[0])
        elif (found := _VERSION.search(text)) is not None:
            _count(self.versions, found[1])

    @property
    def silent(self) -> bool:
        """No line of NCCL's was there."""
        return not any(vars(self).values())

    def table(self) -> list[list[str]]:
        """What it is and its value, one row a thing; empty where nothing was said."""
        rows = [["version", _listed(self.versions)], ["network", _listed(self.networks)]]
        rows += [["interface", _listed(self.interfaces)], ["InfiniBand or RoCE", _listed(self.cards)]]
        for transport, pairs in self._ways().items():
            channels, ways = _number(sum(pairs.values()), "channel"), _number(len(pairs), "pair")
            rows.append([f"via {transport}", f"{channels} between {ways} of ranks"])
        rows += [["set", _listed(self.settings)]]
        rows += [["not used", text] for text, _ in self.reasons.most_common(_SHOWN)]
        for text, count in self.warnings.most_common(_SHOWN):
            rows.append([f"warning{_times(count)}", text])
            rows += [["", f"→ {means}"] for pattern, means in MEANINGS if re.search(pattern, text)][:1]
        rows += [["diagnostics", text] for text in list(self.diagnostics)[:_SHOWN]]
        return [row for row in rows if row[1]]

    def to_dict(self) -> dict[str, Any]:
        """For the document of `dsdoctor comm --json`."""
        counted = {name: dict(counter) for name, counter in vars(self).items() if name != "channels"}
        return {**counted, "channels": self._ways()}

    def _ways(self) -> dict[str, dict[str, int]]:
        """Channels by transport and by pair of ranks, each channel once."""
        ways: dict[str, dict[str, int]] = {}
        for (transport, pair, _), count in self.channels.items():
            pairs = ways.setdefault(transport, {})
            pairs[pair] = max(count, pairs.get(pair, 0))
        return ways


def read_summary(paths: Sequence[str | os.PathLike[str]]) -> NcclSummary:
    """The summary of these logs, as far as they can be read."""
    summary = NcclSummary()
    for source in find(paths):
        try:
            for block in blocks(source):
                summary.feed(block)
        except Unreadable:
            continue
    return summary


def _transport(text: str) -> str:
    """`P2P/CUMEM/read` and `NET/IB/0/GDRDMA` without the number of the card and the direction."""
    parts = text.split("/")
    kept = parts[:2] + [part for part in parts[2:] if "GDR" in part or part == "Shared"]
    return "/".join(kept)


def _count(counter: Counter[Any], key: Any) -> None:
    if key in counter or len(counter) < _MOST:
        counter[key] += 1


def _listed(counter: Iterable[str]) -> str:
    values = list(counter)
    return ", ".join(values[:_SHOWN]) + (", …" if len(values) > _SHOWN else "")


def _number(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _times(count: int) -> str:
    return f" ({count} times)" if count > 1 else ""
