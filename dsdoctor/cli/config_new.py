"""`dsdoctor config DS_CONFIG --new`: write a config that fits, by the memory model; on a terminal it asks."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from dsdoctor.cli.errors import CannotWork
from dsdoctor.cli.options import count
from dsdoctor.units import size


def add_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("writing a new file")
    group.add_argument(
        "--new", action="store_true", help="write DS_CONFIG for --gpu and --host; what is not given is asked for"
    )
    group.add_argument("--params", type=count, metavar="N", help="the model's parameters: 7e9, 7B, 350M")
    group.add_argument("--precision", choices=("bf16", "fp16"), help="default: bf16")
    group.add_argument("--hf", action="store_true", help='for Hugging Face\'s Trainer: "auto" where it fills in')


def run(arguments: argparse.Namespace) -> int:
    from dsdoctor.dsconfig.template import NothingFits, Wish, fitting
    from dsdoctor.machine import described

    target = Path(arguments.config)
    if target.exists():
        raise CannotWork(f"{target} exists already, and --new overwrites nothing")
    _complete(arguments)
    try:
        devices = described.gpus(arguments.gpu)
        host = described.size(arguments.host) if arguments.host else None
    except described.NotUnderstood as error:
        raise CannotWork(str(error)) from None
    wish = Wish(
        parameters=arguments.params,
        gpus=len(devices),
        gpu_bytes=devices[0].total_bytes or 0,
        host_bytes=host or _host_memory(),
        precision=arguments.precision or "bf16",
        hugging_face=arguments.hf,
    )
    try:
        chosen = fitting(wish)
    except NothingFits as error:
        raise CannotWork(str(error)) from None
    try:
        with target.open("x", encoding="utf-8") as file:
            file.write(json.dumps(chosen.config, indent=2) + "\n")
    except OSError as error:
        raise CannotWork(f"cannot write {target}: {error.strerror or error}") from None
    _tell(arguments, target, chosen)
    return 0


class _Question(NamedTuple):
    """What is asked for one option, and how the answer is read. `default` is what an empty answer means."""

    option: str
    text: str
    read: Callable[[str], Any]
    default: str = ""


def _complete(arguments: argparse.Namespace) -> None:
    """Fill in the options that were not given: asked for on a terminal. Raises CannotWork elsewhere."""
    needed = [name for name in ("params", "gpu") if getattr(arguments, name) is None]
    if not needed:
        return
    if arguments.json or not sys.stdin.isatty():
        raise CannotWork("--new needs " + ", ".join(f"--{name}" for name in needed))
    for question in _questions():
        if getattr(arguments, question.option) in (None, False):
            setattr(arguments, question.option, _answer(question))


def _questions() -> Iterator[_Question]:
    """In the order in which they are asked; the GPUs of this machine are the defaults, where the driver lists some."""
    import subprocess

    from dsdoctor.machine.nvidia import gpus

    try:
        devices = gpus().get("driver_devices", ())
    except (OSError, RuntimeError, subprocess.SubprocessError):  # a driver in trouble: nothing to suggest
        devices = ()
    memory = min((device.total_bytes or 0 for device in devices), default=0)
    old = any(device.capability is not None and device.capability < (8, 0) for device in devices)
    yield _Question("params", "parameters of the model (7B, 350M)", count)
    here = f"{len(devices)}x{memory >> 20}MiB" if memory else ""
    yield _Question("gpu", "GPUs of the host (8x80GiB, 4xA100-80G)", _gpus, here)
    yield _Question("precision", "precision: bf16 (Ampere and newer) or fp16", _precision, "fp16" if old else "bf16")
    yield _Question("hf", "for Hugging Face's Trainer or Accelerate (y/n)", _yes, "n")


def _answer(question: _Question) -> Any:
    """What the user answers, asked again until it can be read. Raises CannotWork at the end of the input."""
    while True:
        default = f" [{question.default}]" if question.default else ""
        print(f"{question.text}{default}: ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            raise CannotWork(f"no answer to: {question.text}")
        try:
            return question.read(line.strip() or question.default)
        except (ValueError, argparse.ArgumentTypeError):
            print(f"  not understood: {line.strip() or 'nothing'}", file=sys.stderr)


def _gpus(text: str) -> str:
    """The text itself, once it can be understood."""
    from dsdoctor.machine import described

    described.gpus(text)
    return text


def _precision(text: str) -> str:
    if text.lower() not in ("bf16", "fp16"):
        raise ValueError(text)
    return text.lower()


def _yes(text: str) -> bool:
    if text.lower() not in ("y", "yes", "n", "no"):
        raise ValueError(text)
    return text.lower().startswith("y")


def _host_memory() -> int:
    from dsdoctor.machine.collect import gather
    from dsdoctor.machine.host import control_group, memory

    available = gather([("memory", memory), ("control group", control_group)]).host_available
    if available is None:
        raise CannotWork("the host's free memory is not known here; give --host")
    print(f"dsdoctor: the host is taken to be this one, with {size(available)} free (--host)", file=sys.stderr)
    return available


def _tell(arguments: argparse.Namespace, target: Path, chosen: Any) -> None:
    if arguments.json:
        from dsdoctor.report.document import document, dumps

        extra = {"written": str(target), "config": chosen.config, "why": chosen.why}
        print(dumps(document("config", exit_code=0, findings=(), extra=extra)))
        return
    print(f"wrote {target}: {chosen.why}")
    use = (
        f"TrainingArguments(deepspeed='{target}')" if arguments.hf else f"deepspeed.initialize(config='{target}', ...)"
    )
    print(f"  pass it on: {use}", file=sys.stderr)
    for line in chosen.assumptions:
        print(f"  assumed: {line}", file=sys.stderr)
