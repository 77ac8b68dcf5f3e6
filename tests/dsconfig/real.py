"""Ask the installed DeepSpeed what it makes of configs: one process for many questions, since importing it is slow."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from types import SimpleNamespace

_MARK = "ANSWERS "


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What DeepSpeedConfig did: the error (None: accepted), and the batch sizes it worked out."""

    error: str | None
    train: float | None = None
    micro: float | None = None
    steps: float | None = None


def ask(configs, world_size=1, python=sys.executable):
    """One answer a config, all for the same number of ranks, from the DeepSpeed that `python` imports."""
    environment = os.environ | {"DS_ACCELERATOR": "cpu"}
    if python == sys.executable:
        environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run(
        [python, __file__],
        input=json.dumps({"configs": configs, "world_size": world_size}),
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith(_MARK)]
    assert lines, done.stderr[-2000:]
    return [Answer(**answer) for answer in json.loads(lines[0].removeprefix(_MARK))]


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

    question = json.load(sys.stdin)
    ranks = question["world_size"]
    module.dist = SimpleNamespace(get_rank=lambda: 0, get_world_size=lambda *_group: ranks)
    answers = [_answer(module.DeepSpeedConfig, config) for config in question["configs"]]
    print(_MARK + json.dumps(answers))


if __name__ == "__main__":
    _main()
