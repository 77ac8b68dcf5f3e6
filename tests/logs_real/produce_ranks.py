"""Runs `ranks.py` in all its ways and keeps what is printed, made neutral, in `produced/ranks/`.

python -m tests.logs_real.produce_ranks [NAME…]        # all, or these
"""

from __future__ import annotations

from tests.logs_real import produce
from tests.logs_real.produce import DEEPSPEED, PYTHON, Recipe

FOLDER = produce.PRODUCED / "ranks"
JOB = "ranks.py"


RECIPES = (
    *(Recipe(name, name, job=JOB) for name in (
        "abort", "illegal", "alarm", "invalid-free", "end-abort", "monitored", "tokenising", "branch", "experts",
        "replaced", "device-map", "goes-around",
    )),
    Recipe("ds-abort", "abort", DEEPSPEED, job=JOB),
    Recipe("ds-terminated", "cpu-terminated", DEEPSPEED, job=JOB),
    Recipe("gloo-interface", "gloo-interface", variables={"GLOO_SOCKET_IFNAME": "eth9"}, job=JOB),
    Recipe("nobody-listens", "nobody-listens", PYTHON, {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "{port}"},
           job=JOB),
)  # fmt: skip

if __name__ == "__main__":
    produce.main(RECIPES, FOLDER)
