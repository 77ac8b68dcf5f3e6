"""Several hosts on one machine, for tests: network namespaces on one virtual switch, made and removed by the test.

Every node has its own network, host name, hosts file and, where asked, its own small /dev/shm. Needs root and
iproute2; `missing()` says what is not there.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PORT = 29500
_number = itertools.count()


def missing() -> str:
    """Why no nodes can be made here; empty where they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    absent = [tool for tool in ("ip", "iptables", "unshare") if shutil.which(tool) is None]
    if absent:
        return f"not installed: {', '.join(absent)}"
    tried = subprocess.run(["unshare", "--net", "--uts", "--mount", "true"], capture_output=True, text=True)
    return tried.stderr.strip()


@dataclass
class Process:
    """One rank: what it printed is in files, so that nothing blocks."""

    popen: subprocess.Popen[bytes]
    output: Path
    seconds: float | None = None
    """From `started` to its end."""

    @property
    def document(self) -> dict[str, Any] | None:
        text = self.output.read_text(encoding="utf-8")
        return json.loads(text) if text.strip() else None

    @property
    def errors(self) -> str:
        return self.output.with_suffix(".err").read_text(encoding="utf-8")


@dataclass
class Node:
    """One host. `hosts` are lines of its hosts file; `shm` is the size of its own /dev/shm in bytes."""

    name: str
    address: str
    namespace: str
    folder: Path
    hosts: list[str] = field(default_factory=list)
    shm: int | None = None

    def run(self, *command: str) -> None:
        """A command in its network."""
        subprocess.run(["ip", "netns", "exec", self.namespace, *command], check=True, capture_output=True, timeout=20)

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> Process:
        hosts = self.folder / f"hosts-{self.name}"
        hosts.write_text("\n".join(["127.0.0.1 localhost", *self.hosts, ""]), encoding="utf-8")
        steps = [f"hostname {self.name}", f"mount --bind {hosts} /etc/hosts"]
        if self.shm is not None:
            steps.append(f"mount -t tmpfs -o size={self.shm} tmpfs /dev/shm")
        inside = ["unshare", "--uts", "--mount", "sh", "-c", f'{" && ".join(steps)} && exec "$@"', "sh", *command]
        output = self.folder / f"{self.name}-{next(_number)}.json"
        with open(output, "wb") as out, open(output.with_suffix(".err"), "wb") as err:
            popen = subprocess.Popen(
                ["ip", "netns", "exec", self.namespace, *inside],
                env=dict(environment),
                stdout=out,
                stderr=err,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        return Process(popen, output)


@contextlib.contextmanager
def network(count: int, folder: Path) -> Iterator[list[Node]]:
    """That many nodes, each reaching the others by name and address; everything is gone afterwards."""
    mark = f"dsd{os.getpid()}x{next(_number)}"
    switch = f"{mark}s"
    nodes = [Node(f"node{i}", f"10.77.0.{i + 1}", f"{mark}n{i}", folder) for i in range(count)]
    try:
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "switch", "type", "bridge")
        _ip("-n", switch, "link", "set", "switch", "up")
        for i, node in enumerate(nodes):
            _connect(node, switch, f"port{i}")
            node.hosts = [f"{other.address} {other.name}" for other in nodes]
        yield nodes
    finally:
        for name in (*(node.namespace for node in nodes), switch):
            end_all_in(name)
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def start_ranks(
    nodes: Sequence[Node],
    arguments: Sequence[str] = (),
    *,
    per_node: int = 2,
    master: str = "",
    module: str = "dsdoctor",
    environment: Mapping[int, Mapping[str, str]] | None = None,
    left_out: Sequence[int] = (),
) -> dict[int, Process]:
    """Start `python -m MODULE comm --json ARGUMENTS` as every rank; `environment` is added to that of single ranks."""
    size = per_node * len(nodes)
    started = {}
    for rank in range(size):
        if rank in left_out:
            continue
        variables = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "RANK": str(rank),
            "LOCAL_RANK": str(rank % per_node),
            "LOCAL_WORLD_SIZE": str(per_node),
            "WORLD_SIZE": str(size),
            "MASTER_ADDR": master or nodes[0].address,
            "MASTER_PORT": str(PORT),
            **(environment or {}).get(rank, {}),
        }
        command = [sys.executable, "-m", module, "comm", "--json", "--device", "cpu", *arguments]
        started[rank] = nodes[rank // per_node].start(command, variables)
    return started


def wait(processes: Mapping[int, Process], seconds: float) -> dict[int, int | None]:
    """Exit codes, None for those that had to be killed when the time was up."""
    begun = time.monotonic()
    running = list(processes.values())
    while running and time.monotonic() - begun < seconds:
        for process in [one for one in running if one.popen.poll() is not None]:
            process.seconds = time.monotonic() - begun
            running.remove(process)
        time.sleep(0.1)
    codes = {rank: process.popen.poll() for rank, process in processes.items()}
    for process in processes.values():
        if process.popen.poll() is None:
            os.killpg(process.popen.pid, signal.SIGKILL)
            process.popen.wait()
    return codes


def pids_in(namespace: str) -> list[int]:
    found = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True)
    return [int(pid) for pid in found.stdout.split()]


def end_all_in(namespace: str) -> None:
    for pid in pids_in(namespace):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _connect(node: Node, switch: str, port: str) -> None:
    _ip("netns", "add", node.namespace)
    _ip("link", "add", "eth0", "netns", node.namespace, "type", "veth", "peer", "name", port, "netns", switch)
    _ip("-n", switch, "link", "set", port, "master", "switch", "up")
    _ip("-n", node.namespace, "addr", "add", f"{node.address}/24", "dev", "eth0")
    for device in ("eth0", "lo"):
        _ip("-n", node.namespace, "link", "set", device, "up")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=20)
