"""How the processes of a check that another launcher started tell each other what they know: over torch's store.

One process stands beside each rank (`comm.member`); it never enters a collective, so it can always answer. All of them
meet at the store of rank 0, or of torchrun's agent, under keys of our own. Every wait has a limit.

Imports torch when a store is made, not before.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any, Protocol

from dsdoctor.comm.started import Started

MESSAGE_SECONDS = 5.0
"""A message through the store, and the little work between two of them."""
_POLL = 0.05
_SPARE = 2.0


class Store(Protocol):
    """What is used of torch.distributed.Store."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def add(self, key: str, amount: int) -> int: ...

    def check(self, keys: list[str]) -> bool: ...


class CannotMeet(Exception):
    """The store of rank 0 cannot be reached, or could not be opened there; the message says why."""


def store(place: Started, seconds: float) -> Store:
    """Join the store, or open it where this is rank 0 and no agent did. Raises CannotMeet.

    A thread of its own, since a client of torch's store waits for ever on a server that takes the connection and does
    not speak its language. Such a thread ends with the process.
    """
    joined: list[Store | CannotMeet] = []
    thread = threading.Thread(target=lambda: joined.append(_join(place, seconds)), name="store", daemon=True)
    thread.start()
    thread.join(seconds + _SPARE)
    if not joined:
        raise CannotMeet(f"{place.master_addr}:{place.master_port} {NO_STORE} within {seconds:.0f} s")
    if isinstance(joined[0], CannotMeet):
        raise joined[0]
    return joined[0]


NO_STORE = "takes the connection and does not answer as torch's store"


def _join(place: Started, seconds: float) -> Store | CannotMeet:
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # re-exported by *

    try:
        opened = TCPStore(
            place.master_addr,
            place.master_port,
            is_master=place.rank == 0 and not place.agent_store,
            timeout=timedelta(seconds=seconds),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except Exception as error:
        return CannotMeet(str(error).partition("\n")[0])
    return PrefixStore("dsdoctor/members", opened)


class Meeting:
    """One process's place at the store. JSON in, JSON out.

    A store that has gone (its process died) raises out of any call as torch's DistError; callers treat that as the
    loss of rank 0.
    """

    def __init__(self, store: Store, rank: int) -> None:
        self._store = store
        self._rank = rank

    def join(self, hello: dict[str, Any]) -> None:
        """Enter the list of those that came. A list and not one key a rank, so that two of one rank are both seen.

        Who is counted as joined has been written down: the count alone may run ahead of what it counts.
        """
        number = self._store.add("places", 1)
        self._store.set(f"hello/{number}", json.dumps(hello))
        self._store.add("joined", 1)

    def joined(self, expected: int, seconds: float) -> list[dict[str, Any]]:
        """Everyone who came, as soon as there are `expected` of them, or when the time is up."""
        self.count("joined", expected, seconds)
        keys = [f"hello/{number}" for number in range(1, self._store.add("places", 0) + 1)]
        return [json.loads(self._store.get(key)) for key in keys if self._store.check([key])]

    def tell(self, topic: str, value: Any) -> None:
        """Say something once, for all."""
        self._store.set(topic, json.dumps(value))

    def told(self, topic: str) -> Any | None:
        """What was said on the topic, None while nothing was."""
        return json.loads(self._store.get(topic)) if self._store.check([topic]) else None

    def hear(self, topic: str, seconds: float) -> Any | None:
        """Wait for what is said on a topic; None when the time is up."""
        end = time.monotonic() + seconds
        while True:
            value = self.told(topic)
            if value is not None or time.monotonic() >= end:
                return value
            time.sleep(_POLL)

    def add(self, counter: str) -> None:
        """Count one more."""
        self._store.add(counter, 1)

    def count(self, counter: str, expected: int, seconds: float) -> int:
        """Wait until so many were counted, or the time is up; how many it was."""
        end = time.monotonic() + seconds
        while (count := self._store.add(counter, 0)) < expected and time.monotonic() < end:
            time.sleep(_POLL)
        return count

    def report(self, topic: str, value: Any) -> None:
        """Say something of this rank."""
        self.tell(f"{topic}/{self._rank}", value)

    def reports(self, topic: str, ranks: Iterable[int], seconds: float) -> dict[int, Any]:
        """What these ranks reported, as far as it came within the time."""
        found: dict[int, Any] = {}
        missing = list(ranks)
        end = time.monotonic() + seconds
        while True:
            for rank in list(missing):
                value = self.told(f"{topic}/{rank}")
                if value is not None:
                    found[rank] = value
                    missing.remove(rank)
            if not missing or time.monotonic() >= end:
                return found
            time.sleep(_POLL)


@contextlib.contextmanager
def loss_of_rank_0() -> Iterator[None]:
    """Turns torch's errors on a store that has gone into CannotMeet."""
    from torch.distributed import DistError

    try:
        yield
    except (DistError, RuntimeError) as error:
        raise CannotMeet(f"the store of rank 0 has gone: {str(error).partition(chr(10))[0]}") from error
