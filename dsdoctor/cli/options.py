"""Options that several commands share, and the checks of their values."""

from __future__ import annotations

import argparse
import os
import re
import shutil
from pathlib import Path

from dsdoctor.cli.errors import CannotWork
from dsdoctor.job import Job


def add_output_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON document on stdout, progress on stderr")


def add_job_arguments(parser: argparse.ArgumentParser) -> None:
    """The config, the script and the options of the commands that run it."""
    parser.add_argument("config", metavar="DS_CONFIG")
    parser.add_argument("script", metavar="TRAIN.py")
    add_run_options(parser)
    add_output_options(parser)


def add_run_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("running the script")
    group.add_argument("--nproc", type=positive, metavar="N", help="ranks to start (default: all GPUs, else 2)")
    group.add_argument("--launcher", choices=("torchrun", "deepspeed", "slurm"), default="torchrun")
    group.add_argument("--hostfile", metavar="F", help="hostfile for --launcher deepspeed")
    group.add_argument("--steps", type=positive, default=20, metavar="N", help="optimizer steps a run (default 20)")
    group.add_argument("--timeout", type=duration, default=600.0, metavar="S", help="seconds a run (default 600)")
    group.add_argument("--stall", type=duration, default=60.0, metavar="S", help="seconds a rank may rest (default 60)")
    group.add_argument("--budget", type=duration, metavar="S", help="seconds for the whole command")
    group.add_argument("--out", default="dsdoctor-report", metavar="DIR", help="reports, a numbered folder each")
    group.add_argument("--seed", type=int, metavar="N", help="seed Python, NumPy and torch beforehand")
    group.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    group.add_argument("--module", action="store_true", help="TRAIN.py is the name of a module (python -m)")
    group.add_argument("--resume", action="store_true", help="reuse runs of an earlier call with the same inputs")
    group.add_argument("--shrink", action="store_true", help="build Hugging Face models with 2 layers")
    group.add_argument("--from", dest="checkpoint", metavar="DIR", help="DeepSpeed checkpoint that each run starts at")


def positive(text: str) -> int:
    """A whole number above 0, for argparse."""
    value = int(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def count(text: str) -> int:
    """A number of things with a suffix: `7B`, `350M`, `1.5e9`; for argparse."""
    units = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?(?:[eE][-+]?\d+)?)\s*([A-Za-z]?)\s*", text)
    value = float(match.group(1)) * units.get(match.group(2).lower(), 0) if match else 0.0
    if not 1 <= value < 1e18:
        raise argparse.ArgumentTypeError(f"{text} is no number above 0, with k, M, B or T behind it or nothing")
    return int(value)


def duration(text: str) -> float:
    """Seconds above 0, for argparse."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no number of seconds above 0")
    return value


def job(arguments: argparse.Namespace, *, stages: tuple[str, ...] = ()) -> Job:
    """The job from the parsed options; makes the numbered report folder. Raises CannotWork."""
    config = readable(arguments.config)
    script = arguments.script if arguments.module else str(_script(arguments.script))
    _check_launcher(arguments.launcher, arguments.hostfile)
    return Job(
        config=config,
        script=script,
        args=arguments.script_args,
        as_module=arguments.module,
        nproc=arguments.nproc,
        launcher=arguments.launcher,
        hostfile=arguments.hostfile,
        steps=arguments.steps,
        timeout=arguments.timeout,
        stall=arguments.stall,
        budget=arguments.budget,
        seed=arguments.seed,
        device=arguments.device,
        stages=stages,
        resume=arguments.resume,
        shrink=arguments.shrink,
        checkpoint=_checkpoint(arguments.checkpoint),
        folder=numbered_folder(Path(arguments.out)),
    )


def _checkpoint(path: str | None) -> str | None:
    """An existing checkpoint of DeepSpeed, as an absolute path. It is not read here: it is a pickle."""
    from dsdoctor.runs.intercepts.resume import place_of

    if path is None:
        return None
    if not Path(path).is_dir():
        raise CannotWork(f"not a folder: {path}")
    if place_of(Path(path)) is None:
        raise CannotWork(f"no checkpoint of DeepSpeed in {path}: neither a file `latest` nor model states")
    return str(Path(path).resolve())


def _check_launcher(launcher: str, hostfile: str | None) -> None:
    """Raises CannotWork for a launcher that cannot start anything here, before anything is run."""
    from dsdoctor.runs.launcher import LaunchError, LaunchPlan, chosen_port, world_size

    if launcher == "slurm" and shutil.which("srun") is None:
        raise CannotWork("--launcher slurm needs srun, which is not on the PATH")
    if hostfile is not None and launcher != "deepspeed":
        raise CannotWork("--hostfile is read by the deepspeed launcher only: add --launcher deepspeed")
    try:
        chosen_port()
        if hostfile is not None:
            world_size(LaunchPlan(nproc=1, launcher="deepspeed", hostfile=str(readable(hostfile))))
    except LaunchError as error:
        raise CannotWork(str(error)) from None


def numbered_folder(parent: Path) -> Path:
    """A new folder `0001`, `0002`, … below `parent`; never one that exists. Raises CannotWork."""
    try:
        parent.mkdir(parents=True, exist_ok=True)
        taken = [int(path.name) for path in parent.iterdir() if path.name.isdigit()]
        number = max(taken, default=0) + 1
        while True:
            try:
                folder = parent / f"{number:04d}"
                folder.mkdir()
                return folder.resolve()
            except FileExistsError:
                number += 1
    except OSError as error:
        raise CannotWork(f"cannot write reports to {parent}: {error.strerror or error}") from None


def readable(path: str) -> Path:
    """An existing file that can be read, as an absolute path."""
    found = Path(path)
    if not found.exists():
        raise CannotWork(f"no such file: {path}")
    if not found.is_file():
        raise CannotWork(f"not a file: {path}")
    if not os.access(found, os.R_OK):
        raise CannotWork(f"cannot be read: {path}")
    return found.resolve()


def _script(path: str) -> Path:
    """A file that Python can compile. It is not run here."""
    found = readable(path)
    try:
        compile(found.read_bytes(), str(found), "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        raise CannotWork(f"not a Python script: {path}{f':{line}' if line else ''}: {error}") from None
    return found
