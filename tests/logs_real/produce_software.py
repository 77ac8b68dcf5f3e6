"""Runs `software.py` in all its ways and keeps what is printed, made neutral, in `produced/software/`.

    python -m tests.logs_real.produce_software [NAME…]        # all, or these

What a CPU cannot show is listed in `test_every_diagnosis.py`, with the reason.
"""

from __future__ import annotations

from tests.logs_real import produce
from tests.logs_real.produce import ALONE, PYTHON, Recipe

FOLDER = produce.PRODUCED / "software"
JOB = "software.py"
RECIPES = (
    Recipe("periodic-long", "periodic-long", ALONE, job=JOB),
    Recipe("t5", "t5", job=JOB),
    Recipe("stage-zero", "stage-zero", ALONE, job=JOB),
    Recipe("autocast", "autocast", ALONE, job=JOB),
    Recipe("host-limit", "host-limit", ALONE, job=JOB),
    Recipe("no-headers", "no-headers", PYTHON, job=JOB),
    Recipe("no-ninja", "no-ninja", PYTHON, job=JOB),
    Recipe("no-toolkit", "no-toolkit", PYTHON, job=JOB),
    Recipe("stale-lock", "stale-lock", PYTHON, job=JOB),
    Recipe("cut-shard", "load-cut-off", before=("save",), job=JOB),
    Recipe("incomplete", "convert-incomplete", PYTHON, before=("save",), job=JOB),
    Recipe("mixed", "convert-small", PYTHON, before=("save", "save-small"), job=JOB),
    Recipe("mixed-large", "convert-large", PYTHON, before=("save", "save-large"), job=JOB),
    Recipe("file-limit", "small-file-limit", job=JOB),
    Recipe("key-twice", "key-twice", job=JOB),
    Recipe("removed-section", "removed-section", job=JOB),
    Recipe("refused-value", "refused-value", job=JOB),
    Recipe("asks", "asks", job=JOB),
    Recipe("two-optimizers", "two-optimizers", job=JOB),
    Recipe("no-nvme-path", "no-nvme-path", job=JOB),
)

if __name__ == "__main__":
    produce.main(RECIPES, FOLDER)
