"""`dsdoctor config DS_CONFIG`: lint the config before anything is started, and mend it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsdoctor.cli import config_new
from dsdoctor.cli.errors import CannotWork, tell_broken
from dsdoctor.cli.options import add_output_options, positive

if TYPE_CHECKING:
    from dsdoctor.case import Case
    from dsdoctor.finding import Finding
    from dsdoctor.fixing import Fixed
    from dsdoctor.linting import ConfigAnalysis


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "config",
        help="lint a ds_config",
        description="Hold a ds_config against DeepSpeed's own schema and its options against each other.",
        usage="dsdoctor config DS_CONFIG... [options] [-- script args]",
    )
    parser.add_argument("configs", nargs="+", metavar="DS_CONFIG", help="ds_configs, or Accelerate YAMLs with one")
    parser.add_argument("--script", metavar="TRAIN.py", help="its text: who reads the config, and what goes against it")
    parser.add_argument("--hf-args", metavar="ARGS", help='TrainingArguments: ="--bf16 ...", or a JSON or YAML file')
    parser.add_argument("--model", metavar="PATH", help="the model's config.json, or its folder")
    parser.add_argument("--world-size", type=positive, metavar="N", help="ranks, for the batch sizes")
    parser.add_argument("--deepspeed-version", metavar="V", help="judge for this release (default: the installed one)")
    parser.add_argument("--machine", action="store_true", help="check against this machine too (imports torch)")
    parser.add_argument("--gpu", metavar="SPEC", help="GPUs of one host, for --model and --new: 8x80GiB, 8xA100-80G")
    parser.add_argument("--host", metavar="SIZE", help="host memory free for the job, for --model and --new: 512GiB")
    mend = parser.add_argument_group("mending the file")
    mend.add_argument("--fix", action="store_true", help="write the corrected file, and a backup beside it")
    mend.add_argument("--diff", action="store_true", help="show what --fix would change, write nothing")
    mend.add_argument("--unsafe-fixes", action="store_true", help="also fixes that may change what the run does")
    config_new.add_options(parser)
    add_output_options(parser)
    parser.add_argument("--format", choices=("text", "github", "sarif"), default="text", help="for CI")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if len(arguments.configs) > 1 and (arguments.new or arguments.json or arguments.format == "sarif"):
        raise CannotWork("--new, --json and --format sarif take one file at a time")
    codes = []
    for path in arguments.configs:
        arguments.config = path
        if len(arguments.configs) > 1 and arguments.format == "text":
            print(f"{arguments.config}:")
        codes.append(config_new.run(arguments) if arguments.new else _one(arguments))
    return max(codes)


def _one(arguments: argparse.Namespace) -> int:
    from dsdoctor.cli.config_facts import gather
    from dsdoctor.linting import analyze

    case = gather(arguments)
    fixed = _mend(arguments, case) if arguments.fix or arguments.diff else None
    if fixed is not None and not arguments.diff:
        case = gather(arguments)
    analysis = analyze(case)
    tell_broken(analysis.broken)
    _show(arguments, analysis, fixed)
    return analysis.exit_code


def _mend(arguments: argparse.Namespace, case: Case) -> Fixed:
    from dsdoctor import fixing

    path = Path(arguments.config)
    assert case.config is not None
    if case.config.derived or path.suffix.lower() in (".yaml", ".yml"):
        raise CannotWork(f"only a ds_config itself can be fixed, not {path}")
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        raise CannotWork(f"{path} is not UTF-8") from None
    fixed = fixing.fix(case, text, unsafe=arguments.unsafe_fixes)
    if fixed.text != text and not arguments.diff:
        kept = fixing.back_up(path)
        path.write_bytes(fixed.text.encode("utf-8"))
        print(f"dsdoctor: the file as it was is kept as {kept}", file=sys.stderr)
    return fixed


def _show(arguments: argparse.Namespace, analysis: ConfigAnalysis, fixed: Fixed | None) -> None:
    from dsdoctor.report.document import dumps

    path, findings = arguments.config, analysis.findings
    if arguments.json:
        print(dumps({**analysis.to_dict(), **_changes(arguments, fixed)}))
    elif arguments.format == "sarif":
        from dsdoctor.diagnoses import by_id
        from dsdoctor.report.annotations import sarif

        print(dumps(sarif(findings, path, by_id())))
    elif arguments.format == "github":
        from dsdoctor.report.annotations import github

        print(github(findings, path))
    elif arguments.diff:
        print(_changes(arguments, fixed)["diff"], end="")
    else:
        _tell(analysis.case, findings, fixed)


def _changes(arguments: argparse.Namespace, fixed: Fixed | None) -> dict[str, Any]:
    """What was mended, for the JSON document."""
    if fixed is None:
        return {}
    from dsdoctor.fixing import as_diff

    changes: dict[str, Any] = {
        "fixed": [{"id": finding.id, "keys": finding.keys, "text": fix.text} for finding, fix in fixed.applied]
    }
    if arguments.diff:
        before = Path(arguments.config).read_bytes().decode("utf-8")
        changes["diff"] = as_diff(arguments.config, before, fixed.text)
    return changes


def _tell(case: Case, findings: Sequence[Finding], fixed: Fixed | None) -> None:
    from dsdoctor.report.terminal import Terminal

    terminal, config = Terminal(sys.stdout), case.config
    assert config is not None
    for finding, fix in fixed.applied if fixed is not None else ():
        terminal.line(f"fixed {', '.join(finding.keys)}: {fix.text}", style="green")
    for finding, why in fixed.refused if fixed is not None else ():
        terminal.line(f"not fixed {', '.join(finding.keys)}: {why}", style="yellow")
    terminal.findings(findings)
    safe = sum(
        any(fix.safe and fix.patch for fix in finding.fixes) for finding in findings if finding.severity != "info"
    )
    if safe and fixed is None:
        terminal.line(f"\n{safe} of these can be fixed with --fix (--diff shows how)")
    ranks = f"world size {config.world_size}" if config.world_size else "any world size"
    judged = f"judged for DeepSpeed {config.table_release or 'of an unknown release'}, {ranks}"
    terminal.line(f"{'' if findings else 'nothing wrong; '}{judged}", style="dim")
