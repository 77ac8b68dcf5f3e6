"""NCCL's RAS service, played by a server that speaks as NCCL's sources and manual say."""

import socketserver
import threading
import time

import pytest

from dsdoctor.comm import ras

# the manual's example of a process that was stopped
REPORT = """\
NCCL version 2.24.3 compiled with CUDA 12.6
CUDA runtime version 12060, driver version 12060

Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      4          8            1         32       32

Communicators... (2.05s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         1         4       7-8        32        32   RUNNING  INCOMPLETE

Errors
======

INCOMPLETE
  Missing communicator data from 1 job process
  Process 3487984 on node 172.16.64.213 managing GPU 5

#0-0 (cf264af53edbe986) INCOMPLETE
  Missing communicator data from 1 rank
  The missing rank: 21

Warnings
========

TIMEOUT
  Encountered 2 communication timeouts while gathering communicator data

"""


class Nccl(socketserver.StreamRequestHandler):
    """Answers line by line, and closes after the report."""

    def handle(self):
        for line in self.rfile:
            command = line.decode().rstrip("\r\n").lower()
            if command.startswith("client protocol "):
                self.wfile.write(b"SERVER PROTOCOL 2\n")
            elif command.startswith("timeout "):
                float(command.split()[1])
                self.wfile.write(b"OK\n")
            elif command == "status":
                for part in (REPORT[:300], REPORT[300:]):
                    self.wfile.write(part.encode())
                    self.wfile.flush()
                return
            else:
                self.wfile.write(f"ERROR: Unknown command {command}\n".encode())


class Http(socketserver.StreamRequestHandler):
    def handle(self):
        self.wfile.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")


class Mute(socketserver.StreamRequestHandler):
    def handle(self):
        self.rfile.read()


@pytest.fixture
def serve():
    servers = []

    def start(handler) -> tuple[str, int]:
        server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), handler)
        server.daemon_threads = True
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return server.server_address

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_the_report_and_what_is_wrong_in_it(serve):
    report = ras.ask(5.0, serve(Nccl))
    assert report == REPORT.strip()
    assert ras.troubles(report) == (
        "INCOMPLETE",
        "  Missing communicator data from 1 job process",
        "  Process 3487984 on node 172.16.64.213 managing GPU 5",
        "#0-0 (cf264af53edbe986) INCOMPLETE",
        "  Missing communicator data from 1 rank",
        "  The missing rank: 21",
        "TIMEOUT",
        "  Encountered 2 communication timeouts while gathering communicator data",
    )


def test_where_nccl_looks_for_its_address(serve, monkeypatch):
    host, port = serve(Nccl)
    monkeypatch.setenv("NCCL_RAS_ADDR", f"{host}:{port}")
    assert "Job summary" in ras.ask(5.0)
    monkeypatch.setenv("NCCL_RAS_ADDR", "nonsense")
    monkeypatch.setattr(ras, "_ADDRESS", (host, port))
    assert "Job summary" in ras.ask(5.0)
    monkeypatch.setenv("NCCL_RAS_ADDR", "localhost:many")
    assert ras.ask(5.0) == ""


def test_a_healthy_job_has_no_troubles():
    assert ras.troubles(REPORT.partition("INCOMPLETE\n  Missing")[0] + "\nWarnings\n========\n\n") == ()
    assert ras.troubles("") == ()


def test_nobody_a_stranger_or_one_who_is_silent(serve):
    host, port = serve(Mute)
    begun = time.monotonic()
    assert ras.ask(0.5, (host, port)) == ""
    assert time.monotonic() - begun < 2.0
    assert ras.ask(0.5, serve(Http)) == ""
    assert ras.ask(0.5, ("127.0.0.1", 1)) == ""
