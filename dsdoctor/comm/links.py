"""Can the nodes connect to each other, in each direction, on the addresses that the ranks will use.

One process of each node listens on a port that the system chooses, as NCCL and gloo do, and tries all others at once.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Link:
    """One direction between two nodes, known by the ranks that lead them. `error` is empty where it works."""

    source: int
    target: int
    address: str
    error: str = ""


class Listener:
    """A socket that accepts whoever connects, until it is closed: the kernel completes connections by itself."""

    def __init__(self, address: str) -> None:
        """Raises OSError where the address is not this machine's."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._socket.bind((address, 0))
            self._socket.listen(1024)
        except OSError:
            self._socket.close()
            raise

    @property
    def port(self) -> int:
        return int(self._socket.getsockname()[1])

    def close(self) -> None:
        self._socket.close()


def try_all(source: int, targets: Sequence[tuple[int, str, int]], seconds: float) -> tuple[Link, ...]:
    """Connect to every (rank, address, port) at the same time; `seconds` is the limit for all of them together."""
    end = time.monotonic() + seconds
    links: list[Link] = []
    with selectors.DefaultSelector() as waiting:
        for rank, address, port in targets:
            link = Link(source=source, target=rank, address=address)
            try:
                attempt = _begin(address, port)
            except OSError as error:
                links.append(_with_error(link, error.strerror or str(error)))
                continue
            waiting.register(attempt, selectors.EVENT_WRITE, link)
        while waiting.get_map() and (left := end - time.monotonic()) > 0:
            for key, _ in waiting.select(left):
                links.append(_ended(key.data, key.fileobj))
                _forget(waiting, key.fileobj)
        for key in list(waiting.get_map().values()):
            links.append(_with_error(key.data, f"no answer within {seconds:.0f} s"))
            _forget(waiting, key.fileobj)
    return tuple(sorted(links, key=lambda link: link.target))


def connect_error(address: str, port: int, seconds: float) -> str:
    """Why no connection comes about within that time, empty where one does. Refusals are tried again until then."""
    end = time.monotonic() + seconds
    error = f"no answer within {seconds:.0f} s"
    while (left := end - time.monotonic()) > 0:
        try:
            socket.create_connection((address, port), timeout=left).close()
        except TimeoutError:
            return error if "refused" in error else f"no answer within {seconds:.0f} s"
        except OSError as problem:
            error = problem.strerror or str(problem)
            if problem.errno not in (errno.ECONNREFUSED, errno.ECONNRESET):
                return error
            time.sleep(min(0.2, left))
        else:
            return ""
    return error


def route_to(address: str, port: int) -> str:
    """The own address from which this machine reaches that one; empty without a route. Sends nothing."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, port))
        return str(probe.getsockname()[0])
    return ""


def _begin(address: str, port: int) -> socket.socket:
    attempt = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    attempt.setblocking(False)
    code = attempt.connect_ex((address, port))
    if code not in (0, errno.EINPROGRESS):
        attempt.close()
        raise OSError(code, os.strerror(code))
    return attempt


def _ended(link: Link, attempt: object) -> Link:
    assert isinstance(attempt, socket.socket)
    code = attempt.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    return _with_error(link, os.strerror(code)) if code else link


def _with_error(link: Link, error: str) -> Link:
    return Link(source=link.source, target=link.target, address=link.address, error=error)


def _forget(waiting: selectors.BaseSelector, attempt: object) -> None:
    assert isinstance(attempt, socket.socket)
    waiting.unregister(attempt)
    attempt.close()
