"""`dsdoctor log FILE…`: read any training log and say what happened."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsdoctor.cli.errors import CannotWork
from dsdoctor.cli.options import add_output_options

if TYPE_CHECKING:
    from dsdoctor.logs.facts import LogFacts


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "log",
        help="read any training log and say what happened",
        description="Diagnose the logs of a job: the root cause first, with the lines that prove it.",
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="a log, a folder of logs, .gz or .zst; - for stdin")
    parser.add_argument("--config", metavar="DS_CONFIG", help="the job's ds_config, where the log does not hold it")
    add_output_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from dsdoctor.case import Case
    from dsdoctor.diagnoses import diagnose
    from dsdoctor.dsconfig import load_config
    from dsdoctor.logs.read import Unreadable, read_logs
    from dsdoctor.report.logs import sections

    config = load_config(Path(arguments.config)) if arguments.config else None
    try:
        logs = read_logs(arguments.files, config=config.data if config is not None else None)
    except Unreadable as error:
        raise CannotWork(str(error)) from None
    case = Case(config=config, logs=logs)
    findings = diagnose(case).findings
    code = 1 if any(finding.severity == "error" for finding in findings) else 0
    if arguments.json:
        from dsdoctor.report.document import document, dumps

        print(dumps(document("log", exit_code=code, findings=findings, extra=sections(case))))
        return code
    from dsdoctor.report.terminal import Terminal

    terminal = Terminal(sys.stdout)
    terminal.findings(findings)
    terminal.line(f"\n{_understood(logs)}", style="dim")
    for text in logs.unreadable:
        terminal.line(f"not read: {text}", style="yellow")
    return code


def _understood(logs: LogFacts) -> str:
    """How much of the log was made use of, in one line."""
    end = {"finished": "it ends well", "failed": "it ends with a failure", "open": "it just stops"}[logs.end]
    ranks = f"{len(logs.ranks)} ranks" if logs.ranks else "no rank marks"
    return f"{logs.lines} lines of {len(logs.sources)} file(s), {ranks}, {logs.steps_seen} steps seen; {end}"
