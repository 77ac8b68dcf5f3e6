"""Environment variables that keep experiment trackers off the network and out of the user's folders.

A doctor runs a script many times; none of those runs belongs into the user's history of experiments. Names are from
the manuals of the trackers. A tracker that the user switched off stays off.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def tracker_variables(folder: Path, base: Mapping[str, str]) -> dict[str, str]:
    """Variables to set for a run whose folder is `folder`; `base` is the user's environment."""
    place = folder.absolute()  # exists already: W&B goes elsewhere if it has to create the folder
    variables = {
        "WANDB_MODE": "offline",
        "WANDB_DIR": str(place),
        "WANDB_SILENT": "true",
        "MLFLOW_TRACKING_URI": (place / "mlruns").as_uri(),
        "COMET_START_ONLINE": "false",
        "COMET_MODE": "OFFLINE",
        "COMET_OFFLINE_DIRECTORY": str(place),
        "NEPTUNE_MODE": "offline",
        "CLEARML_OFFLINE_MODE": "1",
        "TENSORBOARD_LOGGING_DIR": str(place / "tensorboard"),
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    for name in ("WANDB_MODE", "COMET_MODE"):
        if base.get(name, "").lower() in ("disabled", "dryrun"):
            variables[name] = base[name]
    return variables
