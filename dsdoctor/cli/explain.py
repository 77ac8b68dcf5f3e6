"""`dsdoctor explain [ID]`: the page of a diagnosis; of a family, or without an id, the catalogue."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dsdoctor.cli.errors import CannotWork
from dsdoctor.cli.options import add_output_options

if TYPE_CHECKING:
    from dsdoctor.diagnoses.base import Diagnosis


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "explain",
        help="the page of a diagnosis, or the catalogue",
        description="Print what a diagnosis means, what proves it, when it can be wrong and what to do.",
    )
    names = "such as loss-scale/collapse, or a family such as hang; without it the catalogue"
    parser.add_argument("id", nargs="?", metavar="ID", help=names)
    add_output_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from dsdoctor.diagnoses import by_id

    catalogue = by_id()
    chosen = _chosen(arguments.id, catalogue)
    if arguments.json:
        from dsdoctor.report.document import document, dumps

        pages = [
            {"id": d.id, "severity": d.severity, "role": d.role, "title": d.title, "page": d.page()} for d in chosen
        ]
        print(dumps(document("explain", exit_code=0, findings=(), extra={"diagnoses": pages})))
    elif arguments.id in catalogue:
        page = catalogue[arguments.id]
        print(f"{page.id}: {page.title} ({page.severity}, {page.role})\n\n{page.page()}")
    else:
        width = max(len(d.id) for d in chosen)
        print("\n".join(f"{d.id:<{width}}  {d.severity:<7}  {d.title}" for d in chosen))
    return 0


def _chosen(name: str | None, catalogue: Mapping[str, Diagnosis]) -> list[Diagnosis]:
    """The diagnosis of this name, those of the family of this name, or all without a name. Raises CannotWork."""
    if name is None:
        return list(catalogue.values())
    if name in catalogue:
        return [catalogue[name]]
    family = [d for d in catalogue.values() if d.id.partition("/")[0] == name.rstrip("/")]
    if not family:
        near = difflib.get_close_matches(name, catalogue, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else "`dsdoctor explain` lists them"
        raise CannotWork(f"no such diagnosis: {name} ({hint})")
    return family
