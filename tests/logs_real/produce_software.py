"""Runs `software.py` in all its ways and keeps what is printed, made neutral, in `produced/software/`.

    python -m tests.logs_real.produce_software [NAME…]        # all, or these

What a CPU cannot show is listed in the test, with the reason.
"""

from __future__ import annotations

from tests.logs_real import produce
from tests.logs_real.produce import ALONE, PYTHON, Recipe

FOLDER = produce.PRODUCED / "software"
JOB = "software.py"
RECIPES = (
    Recipe("host-limit", "host-limit", ALONE, job=JOB),
    Recipe("no-headers", "no-headers", PYTHON, job=JOB),
    Recipe("no-ninja", "no-ninja", PYTHON, job=JOB),
    Recipe("no-toolkit", "no-toolkit", PYTHON, job=JOB),
    Recipe("stale-lock", "stale-lock", PYTHON, job=JOB),
    Recipe("no-nvme-path", "no-nvme-path", job=JOB),
)

if __name__ == "__main__":
    produce.main(RECIPES, FOLDER)
