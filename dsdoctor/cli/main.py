"""The `dsdoctor` command: finds the subcommand, runs it, turns its result into an exit code.

Only the parser of every command is built at start; what a command needs is imported when it runs.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

import dsdoctor
from dsdoctor.cli import blame, comm, config, demo, env, explain, log, memory, nan, triage
from dsdoctor.cli.errors import CannotWork

COMMANDS = (triage, demo, log, memory, config, comm, nan, blame, env, explain)

EXIT_CODES = """exit codes:
  0 nothing wrong   1 at least one error found   2 dsdoctor could not do its work
  3 stopped early (Ctrl-C, --budget)   4 finished, but the verdict is inconclusive"""


class UsageError(Exception):
    """What argparse has against the arguments; `usage` is the text that it prints before."""

    def __init__(self, message: str, usage: str) -> None:
        super().__init__(message)
        self.usage = usage


class Parser(argparse.ArgumentParser):
    """Raises where argparse would print and exit, so that a mistake is a document too."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, self.format_usage())


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="dsdoctor",
        description="The troubleshooting assistant for DeepSpeed training.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"dsdoctor {dsdoctor.__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Arguments after a lone `--` belong to the user's script."""
    given = list(sys.argv[1:] if argv is None else argv)
    if given and given[0].startswith("--local_rank=") and "LOCAL_RANK" in os.environ:
        del given[0]  # put there by the deepspeed launcher
    script_args: list[str] = []
    if "--" in given:
        at = given.index("--")
        given, script_args = given[:at], given[at + 1 :]
    _let_everything_be_printed(as_json="--json" in given)
    try:
        arguments = build_parser().parse_args(given)
    except UsageError as error:
        return _misused(given, error)
    arguments.script_args = tuple(script_args)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            signal.signal(number, _as_interrupt)
    return _kept_going(arguments)


def _misused(given: Sequence[str], error: UsageError) -> int:
    """Exit code 2 with usage and message on stderr, and the document where it was asked for."""
    names = {command.__name__.rpartition(".")[2] for command in COMMANDS}
    command = next((word for word in given if word in names), "")
    asked = argparse.Namespace(command=command, json="--json" in given)
    with contextlib.suppress(OSError):
        sys.stderr.write(error.usage)
    return _ended(asked, 2, str(error))


def _kept_going(arguments: argparse.Namespace) -> int:
    """Run the command. However it ends, that is one line on stderr and, with --json, one document on stdout."""
    try:
        code: int = arguments.run(arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return _ended(arguments, 3, "stopped")
    except BrokenPipeError:
        _drop_output()
        return 2
    except Exception as error:
        return _ended(arguments, 2, _reason(error))
    return code


def _ended(arguments: argparse.Namespace, code: int, reason: str) -> int:
    from dsdoctor.report.document import document, dumps

    try:
        print(f"dsdoctor: {reason}", file=sys.stderr)
        if arguments.json:
            print(dumps(document(arguments.command, exit_code=code, findings=(), extra={"error": reason})))
        sys.stdout.flush()
    except OSError:  # the reader is gone, or the disk is full
        _drop_output()
    return code


def _reason(error: Exception) -> str:
    """One line: what the user can do something about as it is, a fault of ours with its place."""
    from dsdoctor.dsconfig import ConfigUnreadable

    if isinstance(error, (CannotWork, ConfigUnreadable)):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return ": ".join(str(part) for part in (error.filename, error.strerror) if part)
    place = traceback.extract_tb(error.__traceback__)[-1]
    what = " ".join(f"{type(error).__name__}: {error}".split())
    return f"a fault of dsdoctor itself, please report it: {what} ({place.filename}:{place.lineno})"


def _let_everything_be_printed(*, as_json: bool) -> None:
    """Let neither a closed stream nor a character that its encoding lacks end a command; a document is UTF-8."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by the caller; each takes the number that is free, its own
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    if as_json and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")


def _drop_output() -> None:
    """Nobody reads any more: what is still buffered must not fail again when Python ends."""
    null = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(null, descriptor)


def _as_interrupt(signum: int, frame: object) -> None:
    """A wish that the command end is met as Ctrl-C is: everything it started is ended first."""
    raise KeyboardInterrupt
