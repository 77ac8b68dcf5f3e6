"""`dsdoctor comm [DS_CONFIG]`: can the ranks talk."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsdoctor.cli.errors import CannotWork
from dsdoctor.cli.options import add_output_options, duration, positive
from dsdoctor.comm.started import NotComplete, Started, started

if TYPE_CHECKING:
    from dsdoctor.comm.facts import CommFacts
    from dsdoctor.machine.facts import MachineFacts


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "comm",
        help="can the ranks talk, and who cannot",
        description="Start ranks here and check rendezvous, device, allocation and collectives by their values.",
    )
    parser.add_argument("config", metavar="DS_CONFIG", nargs="?", help="for the dtypes that the job will send")
    parser.add_argument("--nproc", type=positive, metavar="N", help="ranks to start (default: all GPUs, else 2)")
    parser.add_argument("--deadline", type=duration, default=30.0, metavar="S", help="seconds a step (default 30)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add_output_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    config = _config(arguments.config) if arguments.config else {}
    try:
        place = started(os.environ)
    except NotComplete as error:
        raise CannotWork(str(error)) from None
    return _check_from_here(arguments, config) if place is None else _take_part(arguments, config, place)


def _check_from_here(arguments: argparse.Namespace, config: Mapping[str, Any]) -> int:
    """Start the ranks on this machine."""
    from dsdoctor.comm.check import check
    from dsdoctor.machine.collect import collect
    from dsdoctor.runs.launcher import LaunchPlan

    machine = collect(config=None, folder=Path.cwd())
    port = os.environ.get("MASTER_PORT", "")
    plan = LaunchPlan(
        nproc=arguments.nproc or len(machine.devices) or 2,
        master_addr=os.environ.get("MASTER_ADDR") or "127.0.0.1",
        master_port=int(port) if port.isdigit() else None,
        device=arguments.device,
    )
    folder = Path(tempfile.mkdtemp(prefix="dsdoctor-comm-"))
    try:
        timeout = 3 * arguments.deadline + 30
        facts = check(plan, config=config, folder=folder, deadline=arguments.deadline, timeout=timeout)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return _tell(arguments, facts, machine)


def _take_part(arguments: argparse.Namespace, config: Mapping[str, Any], place: Started) -> int:
    """Be one rank of a check that a launcher started; one process speaks, all end with its exit code."""
    from dsdoctor.comm.member import Task, take_part
    from dsdoctor.machine.collect import collect

    task = Task(config=config, device=arguments.device, deadline=arguments.deadline)
    try:
        with take_part(place, task) as speaker:
            if speaker.facts is None:
                return speaker.listen()
            code = _tell(arguments, speaker.facts, collect(probe_command=None))  # the others wait for us
            speaker.say(code)
    except ImportError as error:
        raise CannotWork(f"torch cannot be imported by {sys.executable}: {error}") from None
    return code


def _tell(arguments: argparse.Namespace, facts: CommFacts, machine: MachineFacts) -> int:
    from dsdoctor.case import Case
    from dsdoctor.diagnoses import diagnose
    from dsdoctor.report.document import document, dumps
    from dsdoctor.report.terminal import Terminal

    findings = diagnose(Case(comm=facts, machine=machine)).findings
    code = 0 if facts.passed and not any(f.severity == "error" for f in findings) else 1
    if arguments.json:
        extra = {"comm": facts.to_dict()}
        print(dumps(document("comm", exit_code=code, findings=findings, environment=machine.to_dict(), extra=extra)))
        return code
    terminal = Terminal(sys.stdout)
    terminal.findings(findings)
    healthy = f"{facts.world_size} ranks over {facts.backend} on {facts.device}: all values right"
    terminal.line(healthy if facts.passed else facts.problem or "the check failed")
    return code


def _config(path: str) -> Mapping[str, Any]:
    from dsdoctor.dsconfig import load_config

    facts = load_config(Path(path))
    if facts.syntax_error is not None:
        error = facts.syntax_error
        raise CannotWork(f"cannot read the ds_config {path}: line {error.line}, column {error.column}: {error.message}")
    return facts.data
