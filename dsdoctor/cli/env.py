"""`dsdoctor env`: versions, devices, memory limits and known-bad pairs of this machine."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from dsdoctor.cli.errors import tell_broken
from dsdoctor.cli.options import add_output_options
from dsdoctor.finding import Finding, exit_code
from dsdoctor.machine.facts import Limit, MachineFacts
from dsdoctor.units import size


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "env",
        help="versions, devices and limits of this machine",
        description="Report what this machine is to a DeepSpeed job; what is absent is reported as absent.",
    )
    add_output_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from dsdoctor.case import Case
    from dsdoctor.diagnoses import diagnose
    from dsdoctor.machine.collect import collect
    from dsdoctor.report.document import document, dumps

    machine = collect(config=None, folder=Path.cwd())
    diagnosed = diagnose(Case(machine=machine))
    tell_broken(diagnosed.broken)
    findings = diagnosed.findings
    code = exit_code(findings)
    if arguments.json:
        print(dumps(document("env", exit_code=code, findings=findings, environment=machine.to_dict())))
    else:
        _show(machine, findings)
    return code


def _show(machine: MachineFacts, findings: tuple[Finding, ...]) -> None:
    from dsdoctor.report.terminal import Terminal

    terminal = Terminal(sys.stdout)
    rows = _rows(machine)
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        terminal.line(f"{name:<{width}} {value}")
    terminal.findings(findings)


def _rows(machine: MachineFacts) -> list[tuple[str, str]]:
    rows = [
        ("host", f"{machine.host}, {machine.platform}"),
        ("python", f"{machine.python} ({machine.executable})"),
        *sorted(machine.versions.items()),
        ("cores", f"{machine.usable_cores} usable of {machine.cores}"),
        ("memory", f"{size(machine.memory_available)} available of {size(machine.memory_total)}"),
        ("cgroup limit", _limit(machine.cgroup_limit)),
        ("/dev/shm", f"{size(machine.shm_free)} free of {size(machine.shm_total)}"),
        ("memlock", _limit(machine.memlock)),
        *[("disk", f"{size(disk.free_bytes)} free for {disk.path}") for disk in machine.disks],
    ]
    rows += [("GPU", f"{d.name}, {size(d.total_bytes)}") for d in machine.devices] or [("GPU", "none that torch sees")]
    rows += [(name, value) for name, value in sorted(machine.environment.items())]
    return rows + [("not collected", f"{n.probe}: {n.why}") for n in machine.not_collected]


def _limit(value: Limit) -> str:
    return size(value) if isinstance(value, int) else str(value or "unknown")
