"""NCCL's own account of a running job: its RAS service (NCCL 2.24 and later), asked over its socket.

Every process of a job answers for the whole job, one a node at NCCL_RAS_ADDR (localhost:28028). The protocol is lines
of text: `CLIENT PROTOCOL N` is answered by `SERVER PROTOCOL M`, `TIMEOUT S` by `OK`, and `STATUS` by the report, after
which the server closes the connection (NCCL's src/ras/client.cc and client_support.cc).
"""

from __future__ import annotations

import os
import re
import socket
import time

_ADDRESS = ("localhost", 28028)
_PROTOCOL = 2
_MOST = 1 << 13
_TITLE = re.compile(r"^(Errors|Warnings)\n=+\n", re.MULTILINE)


def ask(seconds: float, address: tuple[str, int] | None = None) -> str:
    """The report of the job that runs on this node; empty where nobody answers as NCCL within that time."""
    end = time.monotonic() + seconds
    try:
        with socket.create_connection(address or _configured(), timeout=seconds) as connection:
            # the job's own limit is the shorter one, so that its report comes before ours is up
            connection.sendall(f"CLIENT PROTOCOL {_PROTOCOL}\nTIMEOUT {max(1, int(seconds / 2))}\nSTATUS\n".encode())
            text = _read(connection, end)
    except (OSError, ValueError):
        return ""
    hello, _, report = text.partition("\n")
    if not hello.startswith("SERVER PROTOCOL "):
        return ""
    return report.removeprefix("OK\n").strip()


def troubles(report: str) -> tuple[str, ...]:
    """The lines under `Errors` and `Warnings`; none where NCCL sees nothing wrong."""
    parts = _TITLE.split(report)[1:]
    bodies = [body for title, body in zip(parts[::2], parts[1::2], strict=False)]
    return tuple(line for body in bodies for line in body.splitlines() if line.strip())


def _configured() -> tuple[str, int]:
    """What NCCL_RAS_ADDR says, `HOST:PORT` or `[ADDRESS]:PORT`. Raises ValueError."""
    host, _, port = os.environ.get("NCCL_RAS_ADDR", "").rpartition(":")
    return (host.strip("[]"), int(port)) if host else _ADDRESS


def _read(connection: socket.socket, end: float) -> str:
    """All that comes until the other side closes, or the time is up."""
    parts: list[bytes] = []
    while (left := end - time.monotonic()) > 0 and sum(map(len, parts)) < _MOST:
        connection.settimeout(left)
        try:
            part = connection.recv(4096)
        except TimeoutError:
            break
        if not part:
            break
        parts.append(part)
    return b"".join(parts).decode("utf-8", "replace")
