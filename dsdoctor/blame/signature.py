"""Whether two runs fail in the same way: what a fault leaves behind that another one does not."""

from __future__ import annotations

from collections.abc import Sequence

from dsdoctor.blame.health import judge
from dsdoctor.diagnoses.peers import is_peer_failure
from dsdoctor.frames import users_line
from dsdoctor.runs.facts import Failure, Run

_STUCK = {"hung", "timeout"}


def alike(one: Run, other: Run) -> bool:
    """Both failed, and in the same way: bad numbers both, the same exception, or the same kind of end.

    For exceptions it is the same type, or the same line of the user's code at the same step (DeepSpeed words some of
    torch's own), on whichever rank. What follows from a bad number is not compared.
    """
    mine, theirs = judge(one), judge(other)
    if not (mine.failed and theirs.failed):
        return False
    if mine.numeric or theirs.numeric:
        return mine.numeric and theirs.numeric
    if mine.trouble == theirs.trouble == "raised":
        return _same_exception(own_failures(one), own_failures(other))
    return mine.trouble == theirs.trouble or {mine.trouble, theirs.trouble} <= _STUCK


def own_failures(run: Run) -> list[Failure]:
    """What its ranks raised by themselves; only if there is none, what they raised for lost peers."""
    own = [failure for failure in run.failures if not is_peer_failure(failure)]
    return own or list(run.failures)


def _same_exception(mine: Sequence[Failure], theirs: Sequence[Failure]) -> bool:
    return bool({f.type for f in mine} & {f.type for f in theirs} or _places(mine) & _places(theirs))


def _places(failures: Sequence[Failure]) -> set[tuple[str, int, int | None]]:
    """File, line and step of the user's code that they came through."""
    lines = ((users_line(failure.frames), failure.step) for failure in failures)
    return {(frame.file, frame.line, step) for frame, step in lines if frame is not None}
