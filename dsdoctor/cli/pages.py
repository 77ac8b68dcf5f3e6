"""Where a command is asked for a page for a browser."""

from __future__ import annotations

from pathlib import Path

from dsdoctor.cli.errors import CannotWork


def write_page(path: str, text: str) -> None:
    """Write the page. Raises CannotWork where something else is there, or nothing can be written."""
    from dsdoctor.report import html

    try:
        html.write(Path(path), text)
    except html.NotOurs as refused:
        raise CannotWork(str(refused)) from None
    except OSError as error:
        raise CannotWork(f"{path}: {error.strerror or error}") from None
