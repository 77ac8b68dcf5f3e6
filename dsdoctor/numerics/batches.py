"""Tells one batch from the next by the calls of the model. Runs in rank processes only.

A batch is a forward of the root. All forwards of one `generate()` are one batch. Where the root itself is never called
(the inner model of a wrapper, an encoder and a decoder by turns), a batch begins when a module that was called from
outside in this batch is called from outside again.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Mapping
from types import FrameType
from typing import Any, Protocol

import torch
from torch import nn

from dsdoctor.numerics.hooks import guarded, recomputing, remove

Call = tuple[tuple[Any, ...], Mapping[str, Any]]
"""Positional and keyword arguments."""
_FRAMES = 40
"""Callers of a forward that are looked at for a `generate`."""


class BatchHost(Protocol):
    """What is told of batches."""

    def batch_begins(self, *, training: bool, call: Call | None) -> None: ...
    def batch_ended(self, output: Any, *, raised: bool) -> None: ...
    def problem(self, error: Exception) -> None: ...


class Batches:
    """Hooks on the root module. Register it before the hooks of modules: its end of a batch then comes after theirs.

    `raw` holds the root's inputs as the script handed them over, before an engine's pre-hook casts them, while the
    root's pre-hooks run; `running` tells whether the root's forward runs, `nested` how often it has called itself.
    """

    def __init__(self, root: nn.Module, host: BatchHost) -> None:
        self.raw: Call | None = None
        self.running = False
        self.nested = 0
        self._root = weakref.ref(root)
        self._host = host
        self._generation: weakref.ref[Any] | None = None
        self._called_directly: set[str] = set()
        problem = host.problem
        self._handles = [
            root.register_forward_pre_hook(guarded(self._arrive, problem), prepend=True, with_kwargs=True),
            root.register_forward_pre_hook(guarded(self._begin, problem), with_kwargs=True),
            root.register_forward_hook(guarded(self._end, problem), prepend=True, with_kwargs=True, always_call=True),
        ]

    def detach(self) -> None:
        """Remove the hooks."""
        remove(self._handles)
        self.raw = None

    def called_directly(self, name: str) -> bool:
        """A module other than the root was called by the script's own code. Whether a batch begins with it."""
        if self.running:
            return False
        begins = not self._called_directly or name in self._called_directly
        if begins:
            self._called_directly.clear()
            self._host.batch_begins(training=torch.is_grad_enabled(), call=None)
        self._called_directly.add(name)
        return begins

    def _arrive(self, _: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if not recomputing() and not self._calls_itself():
            self.raw = (args, kwargs)

    def _begin(self, _: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if recomputing():
            return
        if self._calls_itself():
            self.nested += 1
            return
        self.running, self.nested = True, 0
        self._called_directly = {""}
        if not self._goes_on():
            self._host.batch_begins(training=torch.is_grad_enabled(), call=(args, kwargs))

    def _end(self, _: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        if recomputing():
            return
        if self.nested:
            self.nested -= 1
            return
        self.raw, self.running = None, False
        self._host.batch_ended(output, raised=output is None and sys.exc_info()[0] is not None)

    def _calls_itself(self) -> bool:
        """Whether this call of the root stands inside another one; a forward that was left by `sys.exit` has no end."""
        root, calls = self._root(), 0
        frame: FrameType | None = sys._getframe() if self.running else None
        while frame is not None and calls < 2:
            calls += frame.f_code.co_name == "_call_impl" and frame.f_locals.get("self") is root
            frame = frame.f_back
        return calls > 1

    def _goes_on(self) -> bool:
        """Whether this forward belongs to the same `generate()` as the one before."""
        call = None if torch.is_grad_enabled() else _generation(sys._getframe(2))
        known = self._generation() if self._generation is not None else None
        self._generation = None if call is None else weakref.ref(call)
        return call is not None and call is known


def _generation(frame: FrameType | None) -> Any:
    """What lives as long as the `generate()` around this frame: the copy of the config that each call makes."""
    for _ in range(_FRAMES):
        if frame is None:
            return None
        if frame.f_code.co_name == "generate":
            return frame.f_locals.get("generation_config")
        frame = frame.f_back
    return None
