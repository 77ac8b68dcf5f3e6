"""`dsdoctor nan DS_CONFIG TRAIN.py [-- args]`: the first non-finite value of a run.

`nan replay BUNDLE` runs a micro-batch that was kept again, `nan selftest DS_CONFIG TRAIN.py` plants faults in the
script's own model and shows that they are found, `nan compare A B` tells where two runs part.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsdoctor.cli.errors import CannotWork
from dsdoctor.cli.nan_compare import compared
from dsdoctor.cli.options import add_output_options, add_run_options, job, readable
from dsdoctor.cli.pages import write_page
from dsdoctor.cli.triage import examine
from dsdoctor.job import NumericsOrder

if TYPE_CHECKING:
    from dsdoctor.triage import Triage

_STAGES = ("with-deepspeed", "numerics")
_USAGE = """dsdoctor nan DS_CONFIG TRAIN.py [options] [-- script args]
       dsdoctor nan replay BUNDLE [options]
       dsdoctor nan selftest DS_CONFIG TRAIN.py [options] [-- script args]
       dsdoctor nan compare REPORT_A REPORT_B [--json]
       dsdoctor nan compare REPORT --batches I,J [--json]"""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "nan",
        help="name the first non-finite value of a run",
        description="Run the script, and again with the detector on the engine's module: the first non-finite value, "
        "its cause, and fixes that were tried on the same micro-batch. `replay` runs a kept micro-batch again, "
        "`selftest` plants faults in the script's own model and shows that they are found, `compare` tells where two "
        "runs, or two batches of one, part.",
        usage=_USAGE,
    )
    parser.add_argument("first", metavar="DS_CONFIG")
    parser.add_argument("second", metavar="TRAIN.py")
    parser.add_argument("third", nargs="?", help=argparse.SUPPRESS)
    group = parser.add_argument_group("the detector")
    group.add_argument("--trace-batches", type=_batches, default=(), metavar="A,B", help="print these batches in full")
    group.add_argument("--stop-after-batch", type=_batch, metavar="N", help="the last batch to run (from 0)")
    group.add_argument(
        "--batches", type=_batches, default=(), metavar="I,J", help="for `compare`: two batches of a run"
    )
    group.add_argument("--html", metavar="FILE", help="report with a map of the largest values by module and step")
    add_run_options(parser)
    add_output_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    words = [word for word in (arguments.first, arguments.second, arguments.third) if word is not None]
    if words[0] == "replay":
        return _replay(arguments, words[1:])
    if words[0] == "selftest":
        return _selftest(arguments, words[1:])
    if words[0] == "compare":
        return compared(words[1:], arguments.batches, as_json=arguments.json)
    if arguments.batches:
        raise CannotWork(
            "--batches belongs to nan compare; the batches of a run that is to be printed: --trace-batches"
        )
    _take(arguments, words)
    order = NumericsOrder(
        trace_batches=arguments.trace_batches, stop_after_batch=arguments.stop_after_batch, record=True
    )
    asked = replace(job(arguments, stages=_STAGES), numerics=order)
    return examine(asked, "nan", as_json=arguments.json, told=_page(arguments.html))


def _replay(arguments: argparse.Namespace, words: list[str]) -> int:
    """The batch of a bundle on the model that the bundle's script builds."""
    if len(words) != 1:
        raise CannotWork("nan replay takes one folder, a bundle that `dsdoctor nan` kept")
    place = Path(words[0])
    order = _order_of(place)
    arguments.config, arguments.script = str(place / "ds_config.json"), order["script"]
    arguments.module = order["as_module"]
    arguments.script_args = arguments.script_args or tuple(order["args"])
    arguments.nproc = arguments.nproc or 1
    asked = job(arguments, stages=("numerics",))
    asked = replace(asked, cwd=order["cwd"], numerics=NumericsOrder(bundle=str(place.resolve())))
    return examine(asked, "nan", as_json=arguments.json, told=_page(arguments.html))


def _order_of(place: Path) -> dict[str, Any]:
    """What started the run that the bundle is of. Raises CannotWork."""
    try:
        about = json.loads(readable(str(place / "bundle.json")).read_text(encoding="utf-8"))
        order: dict[str, Any] = {
            name: about["order"][name] for name in ("script", "args", "as_module", "cwd", "config")
        }
    except (ValueError, KeyError, TypeError) as error:
        raise CannotWork(f"no bundle of dsdoctor in {place}: {error}") from None
    if not Path(order["cwd"]).is_dir():
        raise CannotWork(f"the script's folder is gone: {order['cwd']}")
    return order


def _selftest(arguments: argparse.Namespace, words: list[str]) -> int:
    """Exit code 0 if every planted fault is found, 1 if one is not, 2 if none could be planted."""
    _take(arguments, words)
    arguments.nproc = arguments.nproc or 1
    asked = replace(job(arguments, stages=("numerics",)), numerics=NumericsOrder(selftest=True))
    page = _page(arguments.html)
    return examine(
        asked, "nan", as_json=arguments.json, exit_code=_found_all, told=lambda result: page(_as_selftest(result))
    )


def _found_all(result: Triage) -> int:
    stage = next((stage for stage in result.stages if stage.name == "numerics"), None)
    if result.stopped_early or stage is None:
        return 3
    return {"passed": 0, "failed": 1}.get(stage.status, 2)


def _as_selftest(result: Triage) -> Triage:
    """Nobody is to blame: the verdict says whether silence of the detector would mean something here."""
    from dsdoctor.finding import Verdict

    code = _found_all(result)
    why = next((stage.why for stage in result.stages if stage.name == "numerics"), "nothing was planted")
    summary = f"Faults planted in the script's own model: {why}."
    confidence = 0.9 if code == 0 else 0.5
    return replace(
        result,
        verdict=Verdict(blame="healthy" if code == 0 else "inconclusive", summary=summary, confidence=confidence),
    )


def _take(arguments: argparse.Namespace, words: list[str]) -> None:
    if len(words) != 2:
        raise CannotWork(f"a config and a script are needed: {_USAGE.splitlines()[0]}")
    arguments.config, arguments.script = words


def _page(path: str | None) -> Callable[[Triage], Triage]:
    """Writes the report in HTML, where it is asked for."""

    def write(result: Triage) -> Triage:
        from dsdoctor.report import html
        from dsdoctor.report.heatmap import heatmap

        if path is None:
            return result
        sections = [heatmap(result.case.headroom)] if result.case.headroom else []
        write_page(path, html.page("dsdoctor nan", result.findings, sections=sections))
        return result

    return write


def _batch(text: str) -> int:
    """The number of a batch, for argparse."""
    if not text.strip().isdecimal():
        raise argparse.ArgumentTypeError(f"{text} is no number of a batch: they count from 0")
    return int(text)


def _batches(text: str) -> tuple[int, ...]:
    """Batches as `1,3`, for argparse."""
    return tuple(map(_batch, text.split(",")))
