"""Follows what a script computes between its model's forward and `backward`: a loss of its own, most often.

No module's hooks see those operations. A dispatch mode does, as it does in a second run of a module (`replay`), and the
nodes that they leave in the graph are watched in the backward pass. Runs in rank processes only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _python_dispatch

from dsdoctor.numerics import anomaly
from dsdoctor.numerics.causes import explain_loss
from dsdoctor.numerics.events import Origin
from dsdoctor.numerics.replay import Tracer


class Outside:
    """What a rank computes outside of its model in one micro-step: from each `go_on` to `stop`, until `forget`.

    Anomaly mode is on meanwhile, without its check: it keeps the line with each node that is made, which also tells
    these nodes from the model's.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._tracer: Tracer | None = None
        self._follows = False
        self._anomaly = (False, True)
        self._culprits: list[anomaly.Culprit] = []
        self._handles: list[Any] = []

    def forget(self) -> None:
        """Another micro-step begins."""
        self.stop()
        if not self._follows:
            self._tracer = None
        self._culprits = []
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def go_on(self) -> None:
        """The model's forward ended. Where the script is inside of a dispatch mode of its own, nothing is followed."""
        if self._follows or not torch.is_grad_enabled() or _python_dispatch._get_current_dispatch_mode_stack():
            return
        self._tracer = self._tracer or Tracer(self._model, communicates=True)
        self._anomaly = (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled())
        if not self._anomaly[0]:
            torch.set_anomaly_enabled(True, check_nan=False)
        self._tracer.__enter__()  # type: ignore[no-untyped-call]
        self._follows = True

    def stop(self) -> None:
        """The model or a backward is about to run. A mode that the script entered since has to be left first."""
        modes = _python_dispatch._get_current_dispatch_mode_stack()
        if self._tracer is not None and modes and modes[-1] is self._tracer:
            self._tracer.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            torch.set_anomaly_enabled(*self._anomaly)
            self._follows = False

    def origin(self, loss: Tensor) -> Origin:
        """Where a bad loss came from."""
        seen = self._tracer.origin(loss) if self._tracer is not None else None
        if seen is None or seen.deliberate:
            return explain_loss(loss)
        if seen.op is None and seen.cause == "unknown":
            return Origin(cause="bad-input", detail="what the loss is computed from was not finite before")
        return seen

    def unjudged(self) -> Tensor | None:
        """A bad loss, it seems, that no backward was run from: a script may look at it and stop."""
        return self._tracer.last_scalar if self._tracer is not None else None

    def watch(self, loss: Tensor) -> None:
        """Watch the nodes between a loss and the model in the backward pass that begins."""
        self._handles += anomaly.watch([loss], self._culprits, with_line=True)

    def derivative(self) -> anomaly.Culprit | None:
        """The operation whose derivative made the first bad gradient, where it is one of those."""
        return self._culprits[0] if self._culprits else None
