"""`dsdoctor demo [--healthy]`: triages the packaged demo, a model that cannot live in fp16."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from dsdoctor.cli.options import add_output_options, duration, numbered_folder
from dsdoctor.cli.triage import examine
from dsdoctor.job import Job


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "demo",
        help="triage the packaged demo",
        description="Triage a small T5-style encoder that overflows fp16 in one block (--healthy: in bf16).",
    )
    parser.add_argument("--healthy", action="store_true", help="the same model in bf16, where nothing is wrong")
    parser.add_argument("--out", default="dsdoctor-report", metavar="DIR", help="reports, a numbered folder each")
    parser.add_argument("--timeout", type=duration, default=600.0, metavar="S", help="seconds a run (default 600)")
    add_output_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    here = Path(__file__).parent.parent / "demo"
    asked = Job(
        config=here / ("ds_config_bf16.json" if arguments.healthy else "ds_config_fp16.json"),
        script=str(here / "train.py"),
        nproc=2,
        steps=20,
        timeout=arguments.timeout,
        folder=numbered_folder(Path(arguments.out)),
    )
    return examine(asked, "demo", as_json=arguments.json)
