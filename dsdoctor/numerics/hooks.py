"""A hook that copies of the model do not take along, and how a batch limit ends a run. Rank processes only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class BatchLimitReached(ValueError):
    """Raised out of the root's forward when `abort_after_batch` asked for the end of the run there."""


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

    def __call__(self, *args: Any) -> None:
        self._function(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> Hook:
        return inert()

    def __reduce__(self) -> tuple[Callable[[], Hook], tuple[()]]:
        return inert, ()


def inert() -> Hook:
    """A hook that does nothing."""
    return Hook(_nothing)


def _nothing(*_: Any) -> None:
    """What a copied hook does."""
