"""`dsdoctor blame DS_CONFIG TRAIN.py [-- args]`: with DeepSpeed and without it, who is to blame."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any, Literal

from dsdoctor.cli.options import add_job_arguments, job
from dsdoctor.cli.triage import examine

_STAGES = ("with-deepspeed", "without-deepspeed", "control-fp32", "bisect")


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "blame",
        help="run the script with and without DeepSpeed",
        description="Run the script with DeepSpeed and without it, and in fp32 where that tells more, and compare.",
        usage="dsdoctor blame DS_CONFIG TRAIN.py [options] [-- script args]",
    )
    add_job_arguments(parser)
    parser.add_argument("--bisect", action="store_true", help="find the keys of the ds_config that turn fail into pass")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    depth: Literal["asked", "suspects"] = "asked" if arguments.bisect else "suspects"
    asked = replace(job(arguments, stages=_STAGES), bisect=depth, ask_libraries_late=True)
    return examine(asked, "blame", as_json=arguments.json)
