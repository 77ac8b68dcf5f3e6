"""The `dsdoctor` command: finds the subcommand, runs it, turns its result into an exit code.

Only the parser of every command is built at start; what a command needs is imported when it runs.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence

import dsdoctor
from dsdoctor.cli import blame, comm, config, demo, env, explain, log, nan, triage
from dsdoctor.cli.errors import CannotWork

COMMANDS = (triage, demo, log, config, comm, nan, blame, env, explain)

EXIT_CODES = """exit codes:
  0 nothing wrong   1 at least one error found   2 dsdoctor could not do its work
  3 stopped early (Ctrl-C, --budget)   4 finished, but the verdict is inconclusive"""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dsdoctor",
        description=dsdoctor.__doc__,
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
    script_args: list[str] = []
    if "--" in given:
        at = given.index("--")
        given, script_args = given[:at], given[at + 1 :]
    arguments = build_parser().parse_args(given)
    arguments.script_args = tuple(script_args)
    signal.signal(signal.SIGTERM, _as_interrupt)
    try:
        code: int = arguments.run(arguments)
    except KeyboardInterrupt:
        print("dsdoctor: stopped", file=sys.stderr)
        return 3
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 2
    except Exception as error:
        if not _is_for_the_user(error):
            raise
        print(f"dsdoctor: {error}", file=sys.stderr)
        return 2
    return code


def _is_for_the_user(error: Exception) -> bool:
    from dsdoctor.dsconfig import ConfigUnreadable

    return isinstance(error, (CannotWork, ConfigUnreadable))


def _as_interrupt(signum: int, frame: object) -> None:
    """SIGTERM ends a command as Ctrl-C does: everything it started is ended first."""
    raise KeyboardInterrupt
