"""`dsdoctor config DS_CONFIG --new`: write a config that fits, by the memory model."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from dsdoctor.cli.errors import CannotWork
from dsdoctor.cli.options import byte_size, count, positive


def add_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("writing a new file")
    group.add_argument("--new", action="store_true", help="write DS_CONFIG; needs --params, --gpus and --gpu-memory")
    group.add_argument("--params", type=count, metavar="N", help="the model's parameters: 7e9, 7B, 350M")
    group.add_argument("--gpus", type=positive, metavar="N", help="GPUs of one host")
    group.add_argument("--gpu-memory", type=byte_size, metavar="SIZE", help="of one GPU: 80GiB, 24GB")
    group.add_argument("--host-memory", type=byte_size, metavar="SIZE", help="free for the job (default: what is here)")
    group.add_argument("--precision", choices=("bf16", "fp16"), default="bf16")
    group.add_argument("--hf", action="store_true", help='for Hugging Face\'s Trainer: "auto" where it fills in')


def run(arguments: argparse.Namespace) -> int:
    from dsdoctor.dsconfig.template import NothingFits, Wish, fitting

    target = Path(arguments.config)
    missing = [name for name in ("params", "gpus", "gpu_memory") if getattr(arguments, name) is None]
    if missing:
        raise CannotWork("--new needs " + ", ".join(f"--{name.replace('_', '-')}" for name in missing))
    wish = Wish(
        parameters=arguments.params,
        gpus=arguments.gpus,
        gpu_bytes=arguments.gpu_memory,
        host_bytes=arguments.host_memory or _host_memory(),
        precision=arguments.precision,
        hugging_face=arguments.hf,
    )
    try:
        chosen = fitting(wish)
    except NothingFits as error:
        raise CannotWork(str(error)) from None
    try:
        with target.open("x", encoding="utf-8") as file:
            file.write(json.dumps(chosen.config, indent=2) + "\n")
    except FileExistsError:
        raise CannotWork(f"{target} exists already, and --new overwrites nothing") from None
    _tell(arguments, target, chosen)
    return 0


def _host_memory() -> int:
    from dsdoctor.machine.collect import gather
    from dsdoctor.machine.host import control_group, memory

    available = gather([("memory", memory), ("control group", control_group)]).host_available
    if available is None:
        raise CannotWork("the host's free memory is not known here; give --host-memory")
    return available


def _tell(arguments: argparse.Namespace, target: Path, chosen: Any) -> None:
    if arguments.json:
        from dsdoctor.report.document import document, dumps

        extra = {"written": str(target), "config": chosen.config, "why": chosen.why}
        print(dumps(document("config", exit_code=0, findings=(), extra=extra)))
        return
    print(f"wrote {target}: {chosen.why}")
    for line in chosen.assumptions:
        print(f"  assumed: {line}", file=sys.stderr)
