"""`dsdoctor log FILE…`: read any training log and say what happened."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from dsdoctor.cli.errors import CannotWork
from dsdoctor.cli.options import add_output_options

if TYPE_CHECKING:
    from dsdoctor.analysis import LogAnalysis
    from dsdoctor.logs.facts import LogFacts
    from dsdoctor.report.terminal import Terminal


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "log",
        help="read any training log and say what happened",
        description="Diagnose the logs of a job: the root cause first, with the lines that prove it.",
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="a log, a folder of logs, .gz or .zst; - for stdin")
    parser.add_argument("--config", metavar="DS_CONFIG", help="the job's ds_config, where the log does not hold it")
    parser.add_argument("--html", metavar="REPORT", help="also write findings and curves to one file for a browser")
    add_output_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from dsdoctor.analysis import analyze_log
    from dsdoctor.logs.read import Unreadable

    try:
        analysis = analyze_log(arguments.files, config=arguments.config)
    except Unreadable as error:
        raise CannotWork(str(error)) from None
    if arguments.html:
        _write_page(arguments.html, analysis)
    if arguments.json:
        from dsdoctor.report.document import dumps

        print(dumps(analysis.to_dict()))
        return analysis.exit_code
    from dsdoctor.report.terminal import Terminal

    terminal = Terminal(sys.stdout)
    terminal.findings(analysis.findings)
    _plot(terminal, analysis.logs)
    terminal.line(f"\n{_understood(analysis.logs)}", style="dim")
    for text in analysis.logs.unreadable:
        terminal.line(f"not read: {text}", style="yellow")
    for broken in analysis.broken:
        terminal.line(f"a rule of dsdoctor itself failed, please report it: {broken}", style="red")
    return analysis.exit_code


def _write_page(path: str, analysis: LogAnalysis) -> None:
    from pathlib import Path

    from dsdoctor.report import html

    try:
        html.write(Path(path), html.page("dsdoctor log", analysis.findings, analysis.logs))
    except html.NotOurs as refused:
        raise CannotWork(str(refused)) from None
    except OSError as error:
        raise CannotWork(f"{path}: {error.strerror or error}") from None


def _plot(terminal: Terminal, logs: LogFacts) -> None:
    """Loss and loss scale over the steps, where the log has enough of them."""
    from dsdoctor.report import plots
    from dsdoctor.report.curves import curves

    if not plots.drawable(sys.stdout.encoding):
        return
    for curve in curves(logs):
        if curve.title in ("loss", "loss scale"):
            terminal.line()
            for line in plots.lines(curve):
                terminal.line(line)


def _understood(logs: LogFacts) -> str:
    """How much of the log was made use of, in one line."""
    end = {"finished": "it ends well", "failed": "it ends with a failure", "open": "it just stops"}[logs.end]
    ranks = f"{len(logs.ranks)} ranks" if logs.ranks else "no rank marks"
    return f"{logs.lines} lines of {len(logs.sources)} file(s), {ranks}, {logs.steps_seen} steps seen; {end}"
