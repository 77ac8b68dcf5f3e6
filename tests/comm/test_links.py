"""Connections between nodes, tried on this machine's own loopback."""

import socket
import time

import pytest

from dsdoctor.comm.links import Link, Listener, connect_error, route_to, try_all


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def test_all_directions_at_once():
    silent = "192.0.2.1"  # reserved for documentation: no route, or no answer
    listener = Listener("127.0.0.1")
    begun = time.monotonic()
    found = try_all(0, [(1, "127.0.0.1", listener.port), (2, "127.0.0.1", closed_port()), (3, silent, 9)], 1.0)
    listener.close()
    assert time.monotonic() - begun < 3.0
    assert [(link.source, link.target) for link in found] == [(0, 1), (0, 2), (0, 3)]
    assert found[0] == Link(source=0, target=1, address="127.0.0.1")
    assert found[1].error == "Connection refused"
    assert found[2].error


def test_a_listener_at_an_address_that_is_not_ours():
    with pytest.raises(OSError, match="assign"):
        Listener("192.0.2.1")


def test_a_server_that_comes_later_is_waited_for():
    port = closed_port()
    assert connect_error("127.0.0.1", port, 0.5) == "Connection refused"
    with socket.create_server(("127.0.0.1", port)):
        assert connect_error("127.0.0.1", port, 5.0) == ""


def test_the_way_to_this_machine_goes_out_from_itself():
    assert route_to("127.0.0.1", 9) == "127.0.0.1"
