"""`dsdoctor nan DS_CONFIG TRAIN.py [-- args]`: the first non-finite value of a run."""

from __future__ import annotations

import argparse
from typing import Any

from dsdoctor.cli.options import add_job_arguments, job
from dsdoctor.cli.triage import examine

_STAGES = ("with-deepspeed", "numerics")


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "nan",
        help="name the first non-finite value of a run",
        description="Run the script, and where its numbers go bad again with the detector on the engine's module.",
        usage="dsdoctor nan DS_CONFIG TRAIN.py [options] [-- script args]",
    )
    add_job_arguments(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    return examine(job(arguments, stages=_STAGES), "nan", as_json=arguments.json)
