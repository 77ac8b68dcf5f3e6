"""Names, addresses and ports, on this machine's own network stack."""

import socket

import pytest

from dsdoctor.comm.place import port_trouble, resolve


def test_this_machine():
    found = resolve("localhost")
    assert found.local
    assert not found.error
    assert set(found.addresses) & {"127.0.0.1", "::1"}


def test_an_address_of_another_machine():
    found = resolve("192.0.2.1")  # reserved for documentation
    assert found.addresses == ("192.0.2.1",)
    assert not found.local


@pytest.mark.parametrize("name", ["no-such-host.invalid", "a" * 300, "bad name"])
def test_no_such_name(name):
    assert resolve(name).error


def test_a_free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert port_trouble(port) == ""


def test_a_connection_that_lingers_does_not_hold_a_port():
    """TIME_WAIT of an earlier run: the rendezvous sets SO_REUSEADDR, so the port is free for it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port))
        accepted, _ = server.accept()
        accepted.close()  # the server closes first, so its side lingers
        client.close()
    assert port_trouble(port) == ""
