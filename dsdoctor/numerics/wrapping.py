"""Wraps methods of one engine instance and takes that back. No torch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

Around = Callable[[Callable[..., Any], Any, Any], Any]
"""Called with the original method, its positional and its keyword arguments; calls it and returns its result."""


class Wrapped:
    """Methods of an instance, wrapped until `undo`. Nothing is wrapped where the instance is None.

    If somebody wrapped them again later, ours stay in their chain but only hand the call on.
    """

    def __init__(self, instance: Any, **arounds: Around) -> None:
        self._instance = instance
        self._active = True
        self._ours: dict[str, tuple[Any, Any]] = {}
        if instance is not None:
            for name, around in arounds.items():
                self._wrap(name, around)

    def _wrap(self, name: str, around: Around) -> None:
        original = getattr(self._instance, name)

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return around(original, args, kwargs) if self._active else original(*args, **kwargs)

        self._ours[name] = (wrapper, self._instance.__dict__.get(name))
        self._instance.__dict__[name] = wrapper

    def undo(self) -> None:
        """Put the instance's own methods back."""
        self._active = False
        for name, (wrapper, before) in self._ours.items():
            if self._instance.__dict__.get(name) is not wrapper:
                continue
            if before is None:
                del self._instance.__dict__[name]
            else:
                self._instance.__dict__[name] = before
        self._ours.clear()
