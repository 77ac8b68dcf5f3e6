"""Exceptions of the user's script as facts: the frames of the script and the libraries, without dsdoctor's own.

Runs in rank processes only; imports no torch.
"""

from __future__ import annotations

import linecache
from pathlib import Path
from types import TracebackType

from dsdoctor.runs.facts import Failure, Frame

_RUNS = Path(__file__).resolve().parent
_OURS = (_RUNS, _RUNS.parent / "numerics")
_PLAYS_A_LIBRARY = _RUNS / "plain"
_CHAIN_AT_MOST = 8


def without_our_frames(traceback: TracebackType | None) -> TracebackType | None:
    """The same traceback, less the frames of dsdoctor (its plain engine stays: it stands where DeepSpeed would)."""
    kept: list[TracebackType] = []
    while traceback is not None:
        if not _is_ours(traceback.tb_frame.f_code.co_filename):
            kept.append(traceback)
        traceback = traceback.tb_next
    result: TracebackType | None = None
    for link in reversed(kept):
        result = TracebackType(result, link.tb_frame, link.tb_lasti, link.tb_lineno)
    return result


def clean(error: BaseException) -> None:
    """Take our frames out of the exception and of all those it was raised from."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        link.__traceback__ = without_our_frames(link.__traceback__)
        link = link.__cause__ or link.__context__


def failure_of(error: BaseException, *, rank: int, step: int | None = None, depth: int = 0) -> Failure:
    """The exception as a Failure, with the exceptions it was raised from, nearest first, in `chain`."""
    return Failure(
        rank=rank,
        type=type_name(type(error)),
        message=_message(error),
        frames=_frames(error),
        step=step,
        chain=() if depth else tuple(failure_of(link, rank=rank, depth=1) for link in _raised_from(error)),
    )


def type_name(kind: type[BaseException]) -> str:
    """The class name as a traceback prints it: with its module, but for built-ins and classes of the script."""
    if kind.__module__ in ("builtins", "__main__"):
        return kind.__qualname__
    return f"{kind.__module__}.{kind.__qualname__}"


def _raised_from(error: BaseException) -> list[BaseException]:
    links: list[BaseException] = []
    while len(links) < _CHAIN_AT_MOST:
        link = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        if link is None or link in links:
            break
        links.append(link)
        error = link
    return links


def _frames(error: BaseException) -> tuple[Frame, ...]:
    frames: list[Frame] = []
    traceback = without_our_frames(error.__traceback__)
    while traceback is not None:
        code = traceback.tb_frame.f_code
        text = linecache.getline(code.co_filename, traceback.tb_lineno, traceback.tb_frame.f_globals).strip()
        frames.append(Frame(file=code.co_filename, line=traceback.tb_lineno, function=code.co_name, text=text))
        traceback = traceback.tb_next
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        text = (error.text or "").strip()
        frames.append(Frame(file=error.filename, line=error.lineno, function="<module>", text=text))
    return tuple(frames)


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return "<exception str() failed>"


def _is_ours(file: str) -> bool:
    path = Path(file)
    return any(path.is_relative_to(ours) for ours in _OURS) and not path.is_relative_to(_PLAYS_A_LIBRARY)
