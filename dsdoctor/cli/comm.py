"""`dsdoctor comm [DS_CONFIG]`: can the ranks talk.

Alone it starts ranks on this machine; with `--hostfile` on others too; started by a launcher it is one rank of a check
on all nodes; with `--read` it reads what NCCL logged; with `--slurm` or `--k8s` it writes a script that starts it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from dsdoctor.cli.errors import CannotWork, tell_broken
from dsdoctor.cli.options import add_output_options, duration, positive
from dsdoctor.cli.pages import write_page
from dsdoctor.comm.started import NotComplete, Started, started

if TYPE_CHECKING:
    from dsdoctor.case import Case
    from dsdoctor.comm.nccl_log import NcclOutput, NcclSummary
    from dsdoctor.finding import Evidence, Finding
    from dsdoctor.logs.facts import LogFacts

_PREFIX = "dsdoctor-comm-"
_START = 60.0
"""Seconds for the launchers of other hosts to come up."""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "comm",
        help="can the ranks talk, and who cannot",
        description="Check rendezvous, links, devices, and collectives by their values, in the sizes of this config.",
        epilog="Alone: ranks on this machine. Under torchrun, deepspeed, srun or mpirun: one rank of a check on all "
        "nodes, e.g. torchrun --nnodes 2 … -m dsdoctor comm ds_config.json",
    )
    parser.add_argument(
        "config", metavar="DS_CONFIG", nargs="?", help="for the dtypes and sizes that the job will send"
    )
    parser.add_argument(
        "--nproc", type=positive, metavar="N", help="ranks (a node) to start (default: all GPUs, else 2)"
    )
    parser.add_argument("--deadline", type=duration, default=30.0, metavar="S", help="seconds a step (default 30)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--hostfile", metavar="F", help="start on its hosts, by the deepspeed launcher")
    parser.add_argument(
        "--read",
        nargs="+",
        metavar="NCCL_LOG",
        help="read what NCCL_DEBUG=INFO logged (files, folders, -); start nothing",
    )
    script = parser.add_mutually_exclusive_group()
    script.add_argument("--slurm", action="store_true", help="print a batch script for sbatch; start nothing")
    script.add_argument("--k8s", action="store_true", help="print manifests for kubectl; start nothing")
    parser.add_argument("--nodes", type=positive, default=2, metavar="N", help="nodes of that script (default 2)")
    parser.add_argument("--image", default="YOUR-IMAGE", help="container image of the --k8s manifests")
    parser.add_argument("--html", metavar="REPORT", help="also write findings and tables to one file for a browser")
    add_output_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if arguments.read:
        with _files(arguments.read) as paths:
            return _read_logs(arguments, paths)
    from dsdoctor.dsconfig import load_data

    config = load_data(arguments.config) if arguments.config else {}
    if arguments.slurm or arguments.k8s:
        return _write_script(arguments, config)
    try:
        place = started(os.environ)
    except NotComplete as error:
        raise CannotWork(str(error)) from None
    if place is not None:
        return _take_part(arguments, config, place)
    return _on_hosts(arguments) if arguments.hostfile else _check_from_here(arguments, config)


def _check_from_here(arguments: argparse.Namespace, config: Mapping[str, Any]) -> int:
    """Start the ranks on this machine."""
    from dsdoctor.case import Case
    from dsdoctor.comm.experiments import with_experiments
    from dsdoctor.machine.collect import collect
    from dsdoctor.runs.launcher import LaunchError, LaunchPlan, chosen_port

    try:
        port = chosen_port()
    except LaunchError as error:
        raise CannotWork(str(error)) from None
    machine = collect(config=None, folder=Path.cwd())
    plan = LaunchPlan(
        nproc=arguments.nproc or len(machine.devices) or 2,
        master_addr=os.environ.get("MASTER_ADDR") or "127.0.0.1",
        master_port=port,
        device=arguments.device,
    )
    with TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True) as name:
        facts, output = with_experiments(
            plan,
            config=config,
            folder=Path(name),
            deadline=arguments.deadline,
            tell=lambda text: print(f"dsdoctor: {text}", file=sys.stderr),
        )
        logs, nccl = _of_nccl(output)
    return _tell(arguments, Case(comm=facts, machine=machine, logs=logs), nccl=nccl)


def _take_part(arguments: argparse.Namespace, config: Mapping[str, Any], place: Started) -> int:
    """Be one rank of a check that a launcher started; one process speaks, all end with its exit code."""
    from dsdoctor.case import Case
    from dsdoctor.comm.member import Task, take_part
    from dsdoctor.comm.nccl_log import NcclOutput
    from dsdoctor.machine.collect import collect

    task = Task(config=config, device=arguments.device, deadline=arguments.deadline)
    try:
        with take_part(place, task) as speaker:
            if speaker.facts is None:
                if speaker.trouble:
                    leader = "what this means is told by local rank 0 of this node"
                    print(f"dsdoctor: rank {place.rank}: {speaker.trouble}; {leader}", file=sys.stderr)
                return speaker.listen()
            machine = collect(probe_command=None)  # the others wait for us
            logs, nccl = _of_nccl(NcclOutput(logs=speaker.nccl_logs))
            code = _tell(arguments, Case(comm=speaker.facts, machine=machine, logs=logs), nccl=nccl)
            speaker.say(code)
    except ImportError as error:
        raise CannotWork(f"torch cannot be imported by {sys.executable}: {error}") from None
    return code


def _on_hosts(arguments: argparse.Namespace) -> int:
    """Let the deepspeed launcher start the ranks, and pass on what the one that speaks for them says."""
    from dsdoctor.comm import on_hosts
    from dsdoctor.report.document import dumps, findings_of
    from dsdoctor.runs import hostfile

    try:
        hostfile.hosts(arguments.hostfile)
    except hostfile.Malformed as error:
        raise CannotWork(str(error)) from None
    told = [*_config_path(arguments), *_options(arguments)]
    with TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True) as name:
        timeout = 3 * arguments.deadline + _START
        output = on_hosts.run(arguments.hostfile, told, folder=Path(name), device=arguments.device, timeout=timeout)
        document = next(on_hosts.documents(output.read_text(encoding="utf-8", errors="replace")), None)
        if document is None:
            return _read_logs(arguments, [str(output)], failed=True)
    if arguments.json:
        print(dumps(document))
    else:
        _print(findings_of(document), str(document["summary"]), document["tables"])
    return int(document["exit_code"])


@contextlib.contextmanager
def _files(given: Sequence[str]) -> Iterator[list[str]]:
    """What was named; standard input as a file, since all is read twice."""
    with TemporaryDirectory(prefix=_PREFIX) as name:
        piped = os.path.join(name, "stdin.log")
        if "-" in given:
            with open(piped, "wb") as copy:
                shutil.copyfileobj(sys.stdin.buffer, copy)
        yield [piped if path == "-" else path for path in given]


def _read_logs(arguments: argparse.Namespace, paths: Sequence[str], *, failed: bool = False) -> int:
    """What NCCL and launchers logged; `failed` where they were to give a result and gave none."""
    from dsdoctor.analysis import analyze_log
    from dsdoctor.comm.nccl_log import read_summary
    from dsdoctor.logs.read import Unreadable

    try:
        analysis = analyze_log(paths)
    except Unreadable as error:
        raise CannotWork(str(error)) from None
    if analysis.logs.silent and not failed:
        raise CannotWork("; ".join(analysis.logs.unreadable))
    tell_broken(analysis.broken)
    nccl = read_summary(paths)
    count = analysis.logs.lines
    summary = "the launcher ended without a result" if failed else f"{count} line{'s' if count != 1 else ''} read"
    if nccl.silent and not failed:
        summary += ", none of them NCCL's: it logs with NCCL_DEBUG=INFO"
    return _tell(arguments, analysis.case, analysis.findings, summary=summary, failed=failed, nccl=nccl)


def _of_nccl(output: NcclOutput) -> tuple[LogFacts | None, NcclSummary | None]:
    """What NCCL said during a check, read before the files are gone; None where there is nothing."""
    from dsdoctor.comm.nccl_log import read_summary
    from dsdoctor.logs.read import Unreadable, read_logs

    try:
        logs = read_logs([output.logs]) if output.logs is not None else None
        return logs, read_summary([path for path in (output.logs, output.printed) if path is not None])
    except Unreadable:
        return None, None


def _write_script(arguments: argparse.Namespace, config: Mapping[str, Any]) -> int:
    from dsdoctor.comm import batch_script

    shape: dict[str, Any] = {
        "nodes": arguments.nodes,
        "nproc": arguments.nproc or 8,
        "gpus": arguments.device != "cpu",
    }
    if arguments.slurm:
        print(batch_script.slurm([*_config_path(arguments), *_options(arguments)], **shape), end="")
    else:
        manifests = batch_script.kubernetes(_options(arguments), image=arguments.image, config=config, **shape)
        print(manifests, end="")
    return 0


def _config_path(arguments: argparse.Namespace) -> list[str]:
    """The ds_config for ranks on nodes that see the files of this one."""
    return [os.path.abspath(arguments.config)] if arguments.config else []


def _options(arguments: argparse.Namespace) -> list[str]:
    """The options of this command for the ranks on other nodes."""
    return ["--deadline", f"{arguments.deadline:g}", "--device", arguments.device]


def _tell(
    arguments: argparse.Namespace,
    case: Case,
    findings: Sequence[Finding] | None = None,
    *,
    summary: str = "",
    failed: bool = False,
    nccl: NcclSummary | None = None,
) -> int:
    """Diagnose, print, and return the exit code."""
    from dsdoctor.diagnoses import diagnose
    from dsdoctor.finding import exit_code
    from dsdoctor.report import comm
    from dsdoctor.report.document import document, dumps

    facts = case.comm
    if findings is None:
        diagnosed = diagnose(case)
        tell_broken(diagnosed.broken)
        findings = diagnosed.findings
    findings = [replace(finding, evidence=tuple(map(_shown, finding.evidence))) for finding in findings]
    failed = failed or (facts is not None and not facts.passed)
    code = 1 if failed else exit_code(findings)
    tables = list(comm.lines(facts, nccl))
    summary = summary or (comm.summary(facts) if facts is not None else "")
    if arguments.html:
        from dsdoctor.report import html

        write_page(arguments.html, html.page("dsdoctor comm", findings, sections=comm.sections(facts, nccl)))
    if arguments.json:
        extra = {
            "comm": facts.to_dict() if facts is not None else None,
            "nccl": nccl.to_dict() if nccl is not None and not nccl.silent else None,
            "summary": summary,
            "tables": tables,
        }
        environment = case.machine.to_dict() if case.machine is not None else None
        print(dumps(document("comm", exit_code=code, findings=findings, environment=environment, extra=extra)))
    else:
        _print(findings, summary, tables)
    return code


def _shown(evidence: Evidence) -> Evidence:
    """What stands in a folder of ours is known by its name only: the folder is gone when this is read."""
    path = Path(evidence.source)
    ours = any(part.startswith(_PREFIX) for part in path.parts)
    return replace(evidence, source=path.name) if ours else evidence


def _print(findings: Sequence[Finding], summary: str, tables: Sequence[str]) -> None:
    from dsdoctor.report.terminal import Terminal

    terminal = Terminal(sys.stdout)
    terminal.findings(findings)
    for line in tables:
        terminal.line(line)
    terminal.line(f"\n{summary}")
