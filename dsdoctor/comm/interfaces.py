"""The network interface that the ranks of this machine will use with each other, and what kind it is.

gloo takes the interface that GLOO_SOCKET_IFNAME names, else the one that has the address of this host's own name, and
the loopback where there is none (ProcessGroupGloo). NCCL takes the interfaces that NCCL_SOCKET_IFNAME allows, else one
named ib*, else any but the loopback and docker's (NCCL's manual, NCCL_SOCKET_IFNAME).
"""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from dsdoctor.machine import interconnect

Kind = Literal["loopback", "virtual", "usual"]

_VIRTUAL = re.compile(r"docker|br-|virbr|vmnet|vboxnet|cni|flannel|cali|lxc|podman|tun|tap|tailscale|wg")


@dataclass(frozen=True, kw_only=True)
class Interface:
    """`name` is empty where no interface of this machine has the address; `addresses` are numeric.

    The first address is the one that is used: of a chosen interface the one that was asked for, else IPv4 first.
    `forced_by` is the variable that chose it, empty where it was the default.
    """

    name: str = ""
    addresses: tuple[str, ...] = ()
    kind: Kind = "usual"
    forced_by: str = ""
    speed: float | None = None
    """Bytes a second, None where the kernel does not know it."""


def interfaces() -> tuple[Interface, ...]:
    """All interfaces of this machine that are up and have an address."""
    import psutil

    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    found = []
    for name, entries in psutil.net_if_addrs().items():
        numeric = [e for e in entries if e.family in (socket.AF_INET, socket.AF_INET6)]
        numeric.sort(key=lambda entry: entry.family != socket.AF_INET)
        addresses = tuple(entry.address.partition("%")[0] for entry in numeric)
        if name in up and addresses:
            kept = kind(name, addresses)
            found.append(Interface(name=name, addresses=addresses, kind=kept, speed=interconnect.ethernet(name)))
    return tuple(found)


def kind(name: str, addresses: Iterable[str]) -> Kind:
    if name == "lo" or any(address == "::1" or address.startswith("127.") for address in addresses):
        return "loopback"
    return "virtual" if _VIRTUAL.match(name) else "usual"


def with_address(address: str, among: Iterable[Interface]) -> Interface:
    """The interface that has the address; all of 127.0.0.0/8 is the loopback's. One without a name if none has it."""
    for one in among:
        if address in one.addresses or (one.kind == "loopback" and address.startswith("127.")):
            return one
    return Interface(addresses=(address,) if address else ())


def chosen(backend: str, environment: Mapping[str, str], among: tuple[Interface, ...], own: str) -> Interface:
    """The interface that `backend` (gloo or nccl) will use; `own` is the address that this host's name resolves to."""
    variable = {"nccl": "NCCL_SOCKET_IFNAME"}.get(backend, "GLOO_SOCKET_IFNAME")
    asked = environment.get(variable, "")
    pick = _nccl if backend == "nccl" else _gloo
    found = pick(asked, among, own)
    if not asked:
        return found
    return replace(found, forced_by=f"{variable}={asked}")


def own_address() -> str:
    """What this host's own name resolves to, empty where it does not."""
    with contextlib.suppress(OSError, UnicodeError):
        return str(socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)[0][4][0])
    return ""


def _gloo(asked: str, among: tuple[Interface, ...], own: str) -> Interface:
    if asked:
        first = asked.split(",")[0]
        return next((one for one in among if one.name == first), Interface(name=first))
    found = with_address(own, among)
    if not found.name:
        return next((one for one in among if one.kind == "loopback"), found)
    return replace(found, addresses=(own, *(address for address in found.addresses if address != own)))


def _nccl(asked: str, among: tuple[Interface, ...], own: str) -> Interface:
    if asked:
        return next((one for one in among if _allowed(one.name, asked)), Interface(name=asked))
    ranked = sorted(among, key=_nccl_order)
    return ranked[0] if ranked else Interface()


def _nccl_order(one: Interface) -> int:
    if one.name.startswith("ib"):
        return 0
    if one.kind == "loopback":
        return 3
    return 2 if one.name.startswith(("docker", "virbr")) else 1


def _allowed(name: str, asked: str) -> bool:
    """`ib,eth` are beginnings of names, `=eth0` is a whole name, a leading `^` excludes all that follow."""
    excludes = asked.startswith("^")
    listed = asked.removeprefix("^").split(",")
    hit = any(name == one[1:] if one.startswith("=") else name.startswith(one) for one in listed if one)
    return hit != excludes
