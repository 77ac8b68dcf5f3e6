"""Runs `ranks.py` in all its ways and keeps what is printed, made neutral, in `produced/ranks/`.

python -m tests.logs_real.produce_ranks [NAME…]        # all, or these
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping

from tests.logs_real import produce
from tests.logs_real.produce import DEEPSPEED, PYTHON, Recipe

FOLDER = produce.PRODUCED / "ranks"
JOB = "ranks.py"


def node(hosts: Mapping[str, list[int]]) -> tuple[str, ...]:
    """What the `deepspeed` command starts on the first of these hosts."""
    world = base64.urlsafe_b64encode(json.dumps(hosts).encode()).decode()
    where = ("--node_rank=0", "--master_addr=127.0.0.1", "--master_port={port}")
    return ("python", "-u", "-m", "deepspeed.launcher.launch", f"--world_info={world}", *where)


RECIPES = (
    *(Recipe(name, name, job=JOB) for name in (
        "abort", "illegal", "alarm", "invalid-free", "end-abort", "monitored", "tokenising", "branch", "experts",
        "generates", "gathers", "replaced", "device-map", "goes-around", "scalar-weight",
    )),
    Recipe("ds-abort", "abort", DEEPSPEED, job=JOB),
    Recipe("ds-terminated", "cpu-terminated", DEEPSPEED, job=JOB),
    Recipe("gloo-interface", "gloo-interface", variables={"GLOO_SOCKET_IFNAME": "eth9"}, job=JOB),
    Recipe("privileged-port", "privileged-port", PYTHON, {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "80"}, job=JOB),
    Recipe("nobody-listens", "nobody-listens", PYTHON, {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "{port}"},
           job=JOB),
    Recipe("world-sizes", "waits", node({"node01": [0, 1], "node02": [0, 1]}), job=JOB,
           beside=node({"node02": [0, 1]})),
)  # fmt: skip

if __name__ == "__main__":
    produce.main(RECIPES, FOLDER)
