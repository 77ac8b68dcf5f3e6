"""Build a model on the meta device from its config.json and list its parameters; runs as a process of its own.

    python -m dsdoctor.memory.meta_build CONFIG.json

prints one JSON object: `parameters` (as `parameter.Parameter`), `tied`, `class`, or `error`. Transformers does the
building: nothing is downloaded, no code of the model's repository is run, no memory is taken for weights.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from dsdoctor.memory.inventory import Inventory
from dsdoctor.memory.parameter import Parameter

TIMEOUT = 120.0
_MARK = "dsdoctor-meta:"


class CannotBuild(Exception):
    """Transformers is not there, or cannot build this model; `str()` is one line for the user."""


def build(config: Path, *, loaded: float) -> Inventory:
    """The inventory of the model that a config.json describes. Takes seconds. Raises CannotBuild."""
    command = [sys.executable, "-m", "dsdoctor.memory.meta_build", str(config)]
    offline = os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False, env=offline)
    except subprocess.TimeoutExpired:
        raise CannotBuild(f"building the model on the meta device took more than {TIMEOUT:g} s") from None
    lines = [line for line in done.stdout.splitlines() if line.startswith(_MARK)]
    if not lines:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise CannotBuild(f"building the model on the meta device failed: {last[:300]}")
    answer = json.loads(lines[-1].removeprefix(_MARK))
    if "error" in answer:
        raise CannotBuild(f"building the model on the meta device failed: {answer['error'][:300]}")
    return Inventory(
        parameters=tuple(Parameter(*one)._replace(loaded=loaded) for one in answer["parameters"]),
        name=answer["class"],
        source="built on the meta device by Transformers",
        tied=answer["tied"],
    )


def _main(path: str) -> None:
    try:
        answer = _built(path)
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}".replace("\n", " ")}
    print(_MARK + json.dumps(answer))


def _built(path: str) -> dict[str, Any]:
    import torch
    import transformers

    from dsdoctor.memory.module import of_module

    config = transformers.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    with torch.device("meta"):
        model = _of_config(config)
    inventory = of_module(model)
    listed = [one._replace(expert=".experts." in one.name) for one in inventory.parameters]
    return {"parameters": listed, "tied": inventory.tied, "class": type(model).__name__}


def _of_config(config: Any) -> Any:
    """The class that the config names as its model's, else one with a head for the next token, else a bare one."""
    import transformers

    named: Any = getattr(transformers, next(iter(getattr(config, "architectures", None) or ()), ""), None)
    if hasattr(named, "_from_config"):
        return named._from_config(config)
    try:
        return transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except ValueError:
        return transformers.AutoModel.from_config(config, trust_remote_code=False)


if __name__ == "__main__":
    _main(sys.argv[1])
