"""`dsdoctor config DS_CONFIG`: lint the config before anything is started."""

from __future__ import annotations

import argparse
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from dsdoctor.cli.options import add_output_options, positive, readable


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "config",
        help="lint a ds_config",
        description="Hold a ds_config against DeepSpeed's own schema and its options against each other.",
        usage="dsdoctor config DS_CONFIG [options] [-- script args]",
    )
    parser.add_argument("config", metavar="DS_CONFIG")
    parser.add_argument("--script", metavar="TRAIN.py", help="who reads the config: tells whether 'auto' is resolved")
    parser.add_argument("--world-size", type=positive, metavar="N", help="ranks, for the batch sizes")
    parser.add_argument("--deepspeed-version", metavar="V", help="judge for this release (default: the installed one)")
    add_output_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from dsdoctor.case import Case
    from dsdoctor.diagnoses import diagnose
    from dsdoctor.dsconfig import load_config
    from dsdoctor.report.document import document, dumps
    from dsdoctor.report.terminal import Terminal
    from dsdoctor.runs.framework import guess

    script = readable(arguments.script).read_text(encoding="utf-8", errors="replace") if arguments.script else None
    facts = load_config(
        Path(arguments.config),
        release=arguments.deepspeed_version or _installed(),
        world_size=arguments.world_size,
        framework=guess(script) if script is not None else None,
        script_args=arguments.script_args,
    )
    findings = diagnose(Case(config=facts)).findings
    code = 1 if any(finding.severity == "error" for finding in findings) else 0
    if arguments.json:
        print(dumps(document("config", exit_code=code, findings=findings)))
    else:
        terminal = Terminal(sys.stdout)
        terminal.findings(findings)
        ranks = f"world size {facts.world_size}" if facts.world_size else "any world size"
        judged = f"judged for DeepSpeed {facts.table_release or 'of an unknown release'}, {ranks}"
        terminal.line(f"{'' if findings else 'nothing wrong; '}{judged}", style="dim")
    return code


def _installed() -> str:
    try:
        return metadata.version("deepspeed")
    except metadata.PackageNotFoundError:
        return ""
