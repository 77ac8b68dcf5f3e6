"""A hook that copies of the model do not take along, and how the detector ends a run. Rank processes only."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

import torch


class RunEnded(ValueError):
    """The detector ends the user's run because it was asked to. Nothing else of its own may pass a hook."""


class BatchLimitReached(RunEnded):
    """Raised out of the root's forward when `abort_after_batch` asked for the end of the run there."""


class NonFiniteFound(RunEnded):
    """Raised by the drop-in class at the first inf or NaN, as the class of Transformers does."""


class Hook:
    """Calls a function of the detector. A deep copy or a pickle of it is inert.

    Scripts deep-copy models (moving averages) and pickle them whole; a bound method among their hooks would drag the
    detector, and with it the engine, along.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    @property
    def live(self) -> bool:
        """False for what became of it in a copy."""
        return self._function is not _nothing

    def silence(self) -> None:
        """Do nothing from here on: torch still calls a hook that is removed while its call is under way."""
        self._function = _nothing

    def __call__(self, *args: Any) -> None:
        self._function(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> Hook:
        return inert()

    def __reduce__(self) -> tuple[Callable[[], Hook], tuple[()]]:
        return inert, ()


def guarded(function: Callable[..., None], problem: Callable[[Exception], None]) -> Hook:
    """A hook whose failures stay ours. It does nothing while torch compiles the code around it."""

    def call(*args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        try:
            function(*args)
        except RunEnded:
            raise
        except Exception as error:
            problem(error)

    return Hook(call)


_second_run = contextvars.ContextVar("second_run", default=False)


@contextlib.contextmanager
def second_run() -> Iterator[None]:
    """Forwards inside are a second run of our own, also where it starts at the end of a backward."""
    token = _second_run.set(True)
    try:
        yield
    finally:
        _second_run.reset(token)


def recomputing() -> bool:
    """Whether a backward pass runs now, so that a forward is the recomputation of activation checkpointing."""
    return torch._C._current_graph_task_id() != -1 and not _second_run.get()


def remove(handles: list[Any]) -> None:
    """Take hooks back, those that are about to be called too."""
    for handle in handles:
        hooks = handle.hooks_dict_ref()
        hook = hooks.get(handle.id) if hooks is not None else None
        if isinstance(hook, Hook):
            hook.silence()
        handle.remove()
    handles.clear()


def inert() -> Hook:
    """A hook that does nothing."""
    return Hook(_nothing)


def _nothing(*_: Any) -> None:
    """What a copied hook does."""
