"""Ask the installed DeepSpeed what it makes of configs: one process for all questions, since importing it is slow."""

import atexit
import json
import os
import subprocess
import sys
import threading
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from types import SimpleNamespace

INSTALLED = metadata.version("deepspeed").split("+")[0]
_MARK = "ANSWERS "
_LONGEST = 300  # seconds for one question


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What DeepSpeedConfig did: the error (None: accepted), and the batch sizes it worked out."""

    error: str | None
    train: float | None = None
    micro: float | None = None
    steps: float | None = None


def ask(configs, world_size=1, python=sys.executable):
    """One answer a config from the DeepSpeed that `python` imports, for a number of ranks or a list of one each."""
    process = _process(python)
    watchdog = threading.Timer(_LONGEST, process.kill)
    watchdog.start()
    try:
        process.stdin.write(json.dumps({"configs": configs, "world_size": world_size}) + "\n")
        process.stdin.flush()
        line = next((line for line in process.stdout if line.startswith(_MARK)), None)
    finally:
        watchdog.cancel()
    assert line is not None, f"{python} ended without an answer"
    return [Answer(**answer) for answer in json.loads(line.removeprefix(_MARK))]


@cache
def _process(python):
    """The process that answers; it ends when its standard input does."""
    environment = os.environ | {"DS_ACCELERATOR": "cpu"}
    if python == sys.executable:
        environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    process = subprocess.Popen(
        [python, __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    )
    atexit.register(process.kill)
    return process


def _answer(make, config):
    try:
        made = make(config)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {
        "error": None,
        "train": made.train_batch_size,
        "micro": made.train_micro_batch_size_per_gpu,
        "steps": made.gradient_accumulation_steps,
    }


def _main():
    import deepspeed.runtime.config as module

    for line in sys.stdin:
        question = json.loads(line)
        configs, sizes = question["configs"], question["world_size"]
        sizes = sizes if isinstance(sizes, list) else [sizes] * len(configs)
        answers = []
        for config, ranks in zip(configs, sizes, strict=True):
            module.dist = SimpleNamespace(get_rank=lambda: 0, get_world_size=lambda *_group, ranks=ranks: ranks)
            answers.append(_answer(module.DeepSpeedConfig, config))
        print(_MARK + json.dumps(answers), flush=True)


if __name__ == "__main__":
    _main()
