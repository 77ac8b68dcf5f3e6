"""The place where the ranks meet, before any starts: does its name resolve, is it this machine, is its port free."""

from __future__ import annotations

import contextlib
import errno
import socket

from dsdoctor.comm.facts import Resolution


def resolve(name: str) -> Resolution:
    """Look the name up as torch will. Takes as long as the resolver takes, which has its own limits."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        return Resolution(name=name, error=str(error))
    addresses = tuple(dict.fromkeys(str(entry[4][0]) for entry in found))
    return Resolution(name=name, addresses=addresses, local=any(map(_is_ours, addresses)))


def port_trouble(port: int) -> str:
    """Why no server can listen on that port of this machine, and who holds it; empty where one can.

    Only a port that another process listens on counts: one that this user may not use (errno 13) says so later itself.
    """
    for family, everywhere in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
        with contextlib.suppress(_NoSuchFamily):
            trouble = _listen(family, everywhere, port)
            if trouble:
                return f"{trouble}{_holder(port)}"
    return ""


class _NoSuchFamily(Exception):
    """The kernel has no such address family."""


def _listen(family: socket.AddressFamily, address: str, port: int) -> str:
    try:
        probe = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise _NoSuchFamily from error
    with probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            if family is socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            probe.bind((address, port))
            probe.listen(1)
        except OSError as error:
            return f"port {port}: {error}" if error.errno == errno.EADDRINUSE else ""
    return ""


def _holder(port: int) -> str:
    """Which process listens there, as far as this user may see it."""
    import psutil

    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections(kind="tcp"):
            listens = connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port
            if listens and connection.pid:
                return f"; held by process {connection.pid} ({psutil.Process(connection.pid).name()})"
    return ""


def _is_ours(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((address, 0))
        return True
    return False
