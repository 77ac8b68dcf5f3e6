"""What the scripts of two ranks share: meet, run what each key on the command line names, write what came of it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator


def run_keys(run: Callable[..., Any]) -> NoReturn:
    """Call `run` with the parts of each key, `A:B:…`; the results go to FOLDER/RANK.json by key, and all ranks end."""
    folder, *wanted = sys.argv[1:]
    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        type(accelerator).is_fp16_supported = lambda _: True  # type: ignore[method-assign]
    deepspeed.init_distributed(dist_backend="gloo" if accelerator.device_name() == "cpu" else None)
    results = {key: run(*key.split(":")) for key in wanted}
    Path(folder, f"{torch.distributed.get_rank()}.json").write_text(json.dumps(results))
    torch.distributed.barrier()
    os._exit(0)  # gloo's threads sometimes abort a process that has finished
