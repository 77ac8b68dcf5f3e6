"""`dsdoctor triage DS_CONFIG TRAIN.py [-- script args]`: all stages, one verdict."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from dsdoctor.cli.errors import CannotWork, tell_broken
from dsdoctor.cli.options import add_job_arguments, job
from dsdoctor.job import Job

if TYPE_CHECKING:
    from dsdoctor.triage import Triage


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "triage",
        help="run all stages on a job and say who is to blame",
        description="Examine a DeepSpeed job in stages and give one verdict. Arguments after -- go to the script.",
        usage="dsdoctor triage DS_CONFIG TRAIN.py [options] [-- script args]",
    )
    add_job_arguments(parser)
    parser.add_argument("--stages", metavar="a,b", help="only these stages (environment and config always run)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    return examine(job(arguments, stages=_stages(arguments.stages)), "triage", as_json=arguments.json)


def examine(
    asked: Job,
    command: str,
    *,
    as_json: bool,
    exit_code: Callable[[Triage], int] = lambda result: result.exit_code,
    told: Callable[[Triage], Triage] = lambda result: result,
) -> int:
    """Run the triage of a job, print it, keep it in the report folder, and return the exit code.

    `exit_code` is a command's own idea of it; `told` may change what is told of the result before it is printed.
    """
    from dsdoctor.blame.table import table
    from dsdoctor.report.document import document, dumps
    from dsdoctor.report.terminal import Terminal
    from dsdoctor.triage import triage

    terminal = Terminal(sys.stderr if as_json else sys.stdout)
    tell = partial(terminal.line, style="dim")
    result = told(triage(asked, done=terminal.stage, tell=tell, progress=terminal.progress))
    code = exit_code(result)
    machine = result.case.machine
    built = document(
        command,
        exit_code=code,
        findings=result.findings,
        environment=machine.to_dict() if machine else None,
        stages=[vars(stage) for stage in result.stages],
        verdict=result.verdict,
        extra={"report_folder": str(asked.folder), "legs": [vars(cell) for cell in table(result.case)]},
    )
    text = dumps(built)
    try:
        (asked.folder / "report.json").write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        print(f"dsdoctor: the report is not kept in {asked.folder}: {error.strerror}", file=sys.stderr)
    tell_broken(result.broken_rules)
    if as_json:
        print(text)
    else:
        terminal.triage(result)
    return code


def _stages(text: str | None) -> tuple[str, ...]:
    from dsdoctor.triage import STAGES

    names = tuple(name.strip() for name in (text or "").split(",") if name.strip())
    unknown = [name for name in names if name not in STAGES]
    if unknown:
        raise CannotWork(f"no such stage: {', '.join(unknown)} (there are {', '.join(STAGES)})")
    return names
