"""`dsdoctor nan compare A B` and `dsdoctor nan compare RUN --batches I,J`: where two runs or two batches part."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dsdoctor.cli.errors import CannotWork
from dsdoctor.numerics.comparing import Comparison, batch, compare
from dsdoctor.numerics.numbers import Number, Numbers, files_in, read

_ASKED = "nan compare takes two runs, or one and --batches I,J"
Ranks = dict[int, Numbers]


def compared(folders: Sequence[str], batches: tuple[int, ...], *, as_json: bool) -> int:
    """Compare and print; the exit code, which is 0: that runs part is an answer, no error. Raises CannotWork."""
    from dsdoctor.report.comparison import lines, to_dict
    from dsdoctor.report.document import document, dumps

    names, comparison = _both(folders, batches)
    if as_json:
        extra = {"comparison": {"a": names[0], "b": names[1], **to_dict(comparison)}}
        print(dumps(document("nan", exit_code=0, findings=(), extra=extra)))
    else:
        print("\n".join(lines(comparison, names, batches=bool(batches))))
    return 0


def _both(folders: Sequence[str], batches: tuple[int, ...]) -> tuple[tuple[str, str], Comparison]:
    if len(folders) == 2 and not batches:
        a, b = map(_numbers, folders)
        if not set(a) & set(b):
            raise CannotWork(f"no rank is in both runs: {sorted(a)} and {sorted(b)}")
        return (_named(folders[0], a), _named(folders[1], b)), compare(_values(a), _values(b))
    if len(folders) != 1 or len(batches) != 2:
        raise CannotWork(_ASKED)
    run = _numbers(folders[0])
    one, other = (_batch(run, number, folders[0]) for number in batches)
    names = [f"batch {number} of {_named(folders[0], run)}" for number in batches]
    return (names[0], names[1]), compare(one, other)


def _batch(run: Ranks, number: int, folder: str) -> dict[int, Sequence[Number]]:
    found = {rank: batch(values, number) for rank, values in _values(run).items()}
    if not any(found.values()):
        last = max((one.batch for values in _values(run).values() for one in values), default=None)
        raise CannotWork(f"there is no batch {number} in {folder}: the last one is {last}")
    return dict(found)


def _values(run: Ranks) -> dict[int, Sequence[Number]]:
    return {rank: numbers.values for rank, numbers in run.items()}


def _named(folder: str, run: Ranks) -> str:
    """The folder, and what of the run may explain that it differs."""
    about = next(iter(run.values())).about
    short = "" if all(numbers.whole for numbers in run.values()) else "; its numbers end before the run did"
    return f"{folder} (world size {about['world_size']}, torch {about['torch']}{short})"


def _numbers(folder: str) -> Ranks:
    """The numbers of a run by rank. Raises CannotWork."""
    files = files_in(Path(folder)) if Path(folder).is_dir() else {}
    if not files:
        raise CannotWork(f"no numbers of a run in {folder}: `dsdoctor nan` leaves them in its report folder")
    try:
        return {rank: read(path) for rank, path in sorted(files.items())}
    except ValueError as error:
        raise CannotWork(str(error)) from None
