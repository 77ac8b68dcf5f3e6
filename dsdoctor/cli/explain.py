"""`dsdoctor explain [ID]`: the page of a diagnosis; without an id the catalogue."""

from __future__ import annotations

import argparse
import difflib
from typing import Any

from dsdoctor.cli.errors import CannotWork
from dsdoctor.cli.options import add_output_options


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "explain",
        help="the page of a diagnosis, or the catalogue",
        description="Print what a diagnosis means, what proves it, when it can be wrong and what to do.",
    )
    parser.add_argument("id", nargs="?", metavar="ID", help="such as loss-scale/collapse; without it the catalogue")
    add_output_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from dsdoctor.diagnoses import by_id

    catalogue = by_id()
    if arguments.id is not None and arguments.id not in catalogue:
        near = difflib.get_close_matches(arguments.id, catalogue, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else "`dsdoctor explain` lists them"
        raise CannotWork(f"no such diagnosis: {arguments.id} ({hint})")
    chosen = [catalogue[arguments.id]] if arguments.id else list(catalogue.values())
    if arguments.json:
        from dsdoctor.report.document import document, dumps

        pages = [
            {"id": d.id, "severity": d.severity, "role": d.role, "title": d.title, "page": d.page()} for d in chosen
        ]
        print(dumps(document("explain", exit_code=0, findings=(), extra={"diagnoses": pages})))
    elif arguments.id:
        page = chosen[0]
        print(f"{page.id}: {page.title} ({page.severity}, {page.role})\n\n{page.page()}")
    else:
        width = max(len(d.id) for d in chosen)
        print("\n".join(f"{d.id:<{width}}  {d.severity:<7}  {d.title}" for d in chosen))
    return 0
