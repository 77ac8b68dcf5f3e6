"""A backward pass that the script starts itself: `loss.backward()` in the place of `engine.backward(loss)`.

Recent releases of DeepSpeed allow it. No method of the engine gets the loss then, but each such call goes through
`torch.autograd.backward`, and the engine notices when the gradient comes to what its forward returned
(`_backward_prologue`; the plain engine has one too): so a loss of another model is told from one of this engine.

Runs in rank processes only; torch is imported by the script before.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from dsdoctor.runs.session import RankSession


class DirectBackward:
    """Tells of backward passes that come to `engine`, until the session is undone.

    `began()` is called when one does, that of `engine.backward` too; `ended(loss)` where it was the script that started
    it. `loss` is None where it was not a single number; one that `engine.scale` multiplied is given as it was before.
    """

    def __init__(
        self, session: RankSession, engine: Any, *, began: Callable[[], None], ended: Callable[[Any], None]
    ) -> None:
        self._session = session
        self._engine = engine
        self._tell_began = began
        self._tell_ended = ended
        self._running = self._reached = False
        self._scaled: Callable[[], Any] = lambda: None
        self._unscaled: Any = None

    def attach(self) -> None:
        import torch

        for kind in type(self._engine).__mro__:
            for name, wrapper in (("_backward_prologue", self._prologue), ("scale", self._scale)):
                if name in vars(kind):
                    self._session.patch(kind, name, wrapper(vars(kind)[name]))
        self._session.patch(torch.autograd, "backward", self._backward(torch.autograd.backward))

    def _prologue(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def method(engine: Any, *args: Any, **kwargs: Any) -> Any:
            if engine is self._engine and not self._reached:
                self._reached = self._running
                self._tell_began()
            return original(engine, *args, **kwargs)

        return method

    def _scale(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def method(engine: Any, loss: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(engine, loss, *args, **kwargs)
            if engine is self._engine:
                with self._session.guard("keep the loss before it is scaled"):
                    self._scaled, self._unscaled = weakref.ref(result), loss.detach()
            return result

        return method

    def _backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """One inside another is the recomputation of a checkpointed module."""

        @functools.wraps(original)
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if self._running:
                return original(tensors, *args, **kwargs)
            self._running, self._reached = True, False
            try:
                result = original(tensors, *args, **kwargs)
            finally:
                self._running, reached, self._reached = False, self._reached, False
            if reached:
                self._tell_ended(self._loss(tensors))
            return result

        return backward

    def _loss(self, tensors: Any) -> Any:
        with self._session.guard("keep the loss"):
            tensor = tensors if not isinstance(tensors, (list, tuple)) else tensors[0] if len(tensors) == 1 else None
            if tensor is not None and tensor.numel() == 1:
                return self._unscaled if tensor is self._scaled() else tensor.detach().clone()
        return None
