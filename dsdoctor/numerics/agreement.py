"""The ranks agree who saw the first bad value: through the store by which they met, never by a collective.

A collective would hang where only some ranks have seen something, where batches are uneven and where a rank has died.
So each rank that has a hit writes one line into the store, over a connection of its own, and waits a limited time for
the others'; the smallest wins. Runs in a thread of its own.
"""

from __future__ import annotations

import json
import socket
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import TCPStore, distributed_c10d  # type: ignore[attr-defined]

from dsdoctor.finding import PHASES, FirstBad

_PAUSE = 0.1
"""Seconds between two looks at the store."""


@dataclass(frozen=True, kw_only=True)
class Sighting:
    """One rank's first bad value. `order` is the number of its report within the step."""

    found: FirstBad
    order: int

    @property
    def key(self) -> int:
        """Its place in time, and after that its rank, as one 63-bit number: the smallest was first."""
        bad = self.found
        parts = (
            (bad.step, 24),
            (bad.micro_step, 10),
            (PHASES.index(bad.phase), 3),
            (self.order, 13),
            (bad.rank, 13),
        )
        key = 0
        for value, bits in parts:
            key = key << bits | min(value, 2**bits - 1)
        return key


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """What the ranks told by the deadline. `why` says in words what kept some from telling, if that is known."""

    sightings: tuple[Sighting, ...]
    world_size: int
    why: str = ""

    @property
    def first(self) -> Sighting:
        return min(self.sightings, key=lambda sighting: sighting.key)

    def text(self) -> str:
        """Who was first, and what the others' sightings say about the cause."""
        first = self.first.found
        ranks = sorted(sighting.found.rank for sighting in self.sightings)
        silent = sorted(set(range(self.world_size)) - set(ranks))
        lines = [f"Of {self.world_size} ranks, {len(ranks)} saw a non-finite value; rank {first.rank} was first."]
        if silent:
            missing = ", ".join(map(str, silent[:8])) + (", …" if len(silent) > 8 else "")
            lines.append(
                f"Nothing was heard of rank {missing}: {self.why or 'no such value there, or no longer alive'}."
            )
        meaning = self._meaning(first)
        return "\n".join([*lines, meaning] if meaning else lines)

    def _meaning(self, first: FirstBad) -> str:
        """Told apart: one rank's data, weights that all share, and the reduction over ranks."""
        if len(self.sightings) < max(2, self.world_size):
            return ""
        at_once = [s for s in self.sightings if _moment(s.found) == _moment(first)]
        if first.phase == "reduction":
            return "Every rank's own gradients were finite: the reduction over the ranks made it."
        if len(at_once) == len(self.sightings):
            return "All ranks saw it at the same place: what they share is the cause (weights, or the same input)."
        if first.phase in ("input", "forward", "loss", "backward"):
            return f"The others saw it later: the data, or the device, of rank {first.rank} is the cause."
        return ""


def _moment(bad: FirstBad) -> tuple[Any, ...]:
    return bad.step, bad.micro_step, bad.phase, bad.module, bad.tensor


def agree(sighting: Sighting, *, name: str, deadline: float) -> Agreement:
    """Tell the others and hear what they saw, waiting `deadline` seconds at most. `name` is the same on all ranks.

    Where there is no store, or it cannot be reached, this rank's sighting is all that is known.
    """
    world_size = torch.distributed.get_world_size()
    end = time.monotonic() + deadline
    heard = {sighting.found.rank: sighting}
    try:
        store = _own_connection(deadline)
        store.set(_key(name, sighting.found.rank), json.dumps(asdict(sighting)))
        while len(heard) < world_size and time.monotonic() < end:
            for rank in set(range(world_size)) - set(heard):
                if store.check([_key(name, rank)]):
                    heard[rank] = _parsed(store.get(_key(name, rank)))
            time.sleep(_PAUSE)
    except Exception as error:  # a rank that kept the store is dead, or the backend has none
        why = f"the store of the ranks cannot be reached ({type(error).__name__})"
        return Agreement(sightings=tuple(heard.values()), world_size=world_size, why=why)
    return Agreement(sightings=tuple(heard.values()), world_size=world_size)


def _own_connection(timeout: float) -> Any:
    """The ranks' store, over another connection: that of the training thread may be held by a wait."""
    store = distributed_c10d._get_default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    if not isinstance(store, TCPStore):
        return store
    socket.create_connection((store.host, store.port), timeout=timeout).close()  # TCPStore itself would try for long
    limit = timedelta(seconds=timeout)
    return TCPStore(store.host, store.port, None, False, limit, wait_for_workers=False)


def _key(name: str, rank: int) -> str:
    return f"dsdoctor/{name}/{rank}"


def _parsed(text: bytes) -> Sighting:
    values = json.loads(text)
    return Sighting(found=FirstBad(**values["found"]), order=values["order"])
