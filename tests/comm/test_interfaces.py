"""Which interface gloo and NCCL take: rules of their manuals, on made-up machines."""

import pytest

from dsdoctor.comm.interfaces import Interface, chosen, interfaces, kind, with_address

LO = Interface(name="lo", addresses=("127.0.0.1", "::1"), kind="loopback")
DOCKER = Interface(name="docker0", addresses=("172.17.0.1",), kind="virtual")
ETH = Interface(name="eth0", addresses=("10.0.0.7", "fe80::1"))
IB = Interface(name="ib0", addresses=("10.1.0.7",))


@pytest.mark.parametrize(
    ("backend", "environment", "own", "expected"),
    [
        ("gloo", {}, "10.0.0.7", "eth0"),
        ("gloo", {}, "127.0.1.1", "lo"),  # Debian's hosts file gives a host's own name this address
        ("gloo", {}, "", "lo"),
        ("gloo", {"GLOO_SOCKET_IFNAME": "docker0"}, "10.0.0.7", "docker0"),
        ("gloo", {"NCCL_SOCKET_IFNAME": "docker0"}, "10.0.0.7", "eth0"),
        ("nccl", {}, "127.0.1.1", "ib0"),
        ("nccl", {"NCCL_SOCKET_IFNAME": "eth,ib"}, "", "eth0"),
        ("nccl", {"NCCL_SOCKET_IFNAME": "^eth,lo,docker"}, "", "ib0"),
        ("nccl", {"NCCL_SOCKET_IFNAME": "=eth"}, "", "=eth"),  # a whole name, and there is none like it
    ],
)
def test_chosen(backend, environment, own, expected):
    found = chosen(backend, environment, (LO, DOCKER, ETH, IB), own)
    assert found.name == expected
    assert bool(found.forced_by) == any(name.startswith(backend.upper()) for name in environment)


def test_gloo_listens_on_the_address_of_the_hosts_own_name():
    assert chosen("gloo", {}, (LO, ETH), "127.0.1.1").addresses[0] == "127.0.1.1"


def test_without_infiniband_nccl_leaves_docker_and_the_loopback_for_last():
    assert chosen("nccl", {}, (LO, DOCKER, ETH), "").name == "eth0"
    assert chosen("nccl", {}, (LO, DOCKER), "").name == "docker0"
    assert chosen("nccl", {}, (LO,), "").name == "lo"


def test_kinds_and_addresses():
    assert kind("docker0", ("172.17.0.1",)) == "virtual"
    assert kind("enp3s0", ("10.0.0.7",)) == "usual"
    assert with_address("127.0.1.1", (ETH, LO)) == LO
    assert with_address("10.9.9.9", (ETH, LO)).name == ""


def test_this_machine_has_a_loopback():
    assert any(one.kind == "loopback" for one in interfaces())
