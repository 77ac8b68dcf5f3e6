"""`dsdoctor log FILE…`: read any training log and say what happened."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dsdoctor.cli.errors import CannotWork, tell_broken
from dsdoctor.cli.options import add_output_options
from dsdoctor.cli.pages import write_page

if TYPE_CHECKING:
    from dsdoctor.analysis import LogAnalysis
    from dsdoctor.finding import Finding
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
    parser.add_argument("--follow", action="store_true", help="go on reading what is added; Ctrl-C ends it")
    add_output_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from dsdoctor.analysis import analyze_log
    from dsdoctor.logs.read import Unreadable

    try:
        if arguments.follow:
            return _follow(arguments)
        analysis = analyze_log(arguments.files, config=arguments.config)
    except Unreadable as error:
        raise CannotWork(str(error)) from None
    if analysis.logs.silent and not analysis.findings:
        raise CannotWork("; ".join(analysis.logs.unreadable))
    _print(arguments, analysis, analysis.findings, analysis.exit_code)
    return analysis.exit_code


def _follow(arguments: argparse.Namespace) -> int:
    """Print each finding once, when it becomes true; sum up when the user stops, or when the pipes end."""
    from dsdoctor.analysis import DOUBTFUL, follow_log
    from dsdoctor.report.terminal import Terminal

    shown: set[str] = set()
    for analysis, stopped in follow_log(arguments.files, config=arguments.config):
        new = tuple(finding for finding in analysis.findings if finding.id not in shown)
        if stopped is not None:
            code = 3 if stopped else analysis.exit_code
            _print(arguments, analysis, analysis.findings if arguments.json else new, code)
            return code
        new = tuple(finding for finding in new if finding.confidence > DOUBTFUL)
        shown.update(finding.id for finding in new)
        if new and not arguments.json:
            Terminal(sys.stdout).findings(new)
            sys.stdout.flush()
    return 0


def _print(arguments: argparse.Namespace, analysis: LogAnalysis, findings: Sequence[Finding], code: int) -> None:
    """The page where one is wanted, and the document or these findings with what was understood."""
    tell_broken(analysis.broken)
    if arguments.html:
        from dsdoctor.report import html

        write_page(arguments.html, html.page("dsdoctor log", analysis.findings, analysis.logs))
    if arguments.json:
        from dsdoctor.report.document import dumps

        print(dumps({**analysis.to_dict(), "exit_code": code}))
        return
    from dsdoctor.report.terminal import Terminal

    terminal = Terminal(sys.stdout)
    if findings or not analysis.findings:
        terminal.findings(findings)
    _plot(terminal, analysis.logs)
    terminal.line(f"\n{_understood(analysis.logs)}", style="dim")
    for text in analysis.logs.unreadable:
        terminal.line(f"not read: {text}", style="yellow")


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
