"""Which hooks are on the model: the sentinel's, those that frame every module or both, and those that record.

Runs in rank processes only.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Protocol

from torch import nn

from dsdoctor.numerics.batches import Batches
from dsdoctor.numerics.forward import ForwardWatch
from dsdoctor.numerics.forward import Host as ForwardHost
from dsdoctor.numerics.frames import FrameLog
from dsdoctor.numerics.gradients import GradientWatch, MeasuredGradients, Report
from dsdoctor.numerics.ledger import Ledger
from dsdoctor.numerics.recording import Recording
from dsdoctor.numerics.sentinel import Host as SentinelHost
from dsdoctor.numerics.sentinel import Sentinel
from dsdoctor.numerics.weights import WeightWatch


class Host(ForwardHost, SentinelHost, Protocol):
    """What all hooks ask of the detector."""


class Watches:
    """The hooks of one detector. `forward` is there while modules are framed, `sentinel` while blocks are recorded.

    `measured` are the gradients of the framed modules.
    """

    def __init__(
        self,
        model: nn.Module,
        host: Host,
        batches: Batches,
        ledger: Ledger,
        frames: FrameLog,
        weights: WeightWatch,
        *,
        backward: bool,
        traced: Collection[int],
        bad_gradient: Report,
    ) -> None:
        self.sentinel: Sentinel | None = None
        self.forward: ForwardWatch | None = None
        self.measured = MeasuredGradients(bad_gradient)
        self._model = model
        self._host = host
        self._batches = batches
        self._ledger = ledger
        self._frames = frames
        self._weights = weights
        self._backward = backward
        self._traced = frozenset(traced)
        self._gradients: GradientWatch | None = None
        self._recording: Recording | None = None

    def use_sentinel(self) -> None:
        """Record the blocks from here on."""
        self.sentinel = Sentinel(self._model, self._host, self._batches, backward=self._backward)
        self._weights.start(self._model)

    def use_frames(self) -> None:
        """Frame every module from here on."""
        if self.sentinel is not None:
            self.sentinel.detach()
            self.sentinel = None
        if self._backward:
            self._gradients = GradientWatch(self.measured.look, self._host.problem)
        self.forward = self._framed(self._gradients, suspecting=True)

    def record(self, recording: Recording, target: Any) -> None:
        """Write the numbers of the engine or module from here on; the other hooks come first."""
        recording.follow(target)
        self._recording = recording

    def arrange_trace(self, batch: int) -> None:
        """Take frames of that batch if it is to be traced."""
        traced = batch in self._traced
        if traced:
            self._frames.start_trace()
        if self.sentinel is None:
            return
        if traced and self.forward is None:
            self.forward = self._framed(None, suspecting=False)
        elif not traced and self.forward is not None:
            self.forward.detach()
            self.forward = None

    def batch_begins(self, *, training: bool) -> None:
        """Forget what was noted of the batch before."""
        if self.forward is not None:
            self.forward.reset()
        if self.sentinel is not None:
            self.sentinel.reset(training=training)

    def fall_silent(self) -> None:
        """All is told: frames go on for traces, nothing is suspected or recorded any more."""
        if self.sentinel is not None:
            self.sentinel.detach()
        if self.forward is not None:
            self.forward.suspecting = False
        if self._gradients is not None:
            self._gradients.detach()

    def detach(self) -> None:
        """Remove every hook."""
        for watch in (self.sentinel, self.forward, self._gradients, self._recording):
            if watch is not None:
                watch.detach()

    def _framed(self, gradients: GradientWatch | None, *, suspecting: bool) -> ForwardWatch:
        return ForwardWatch(
            self._model,
            self._host,
            self._batches,
            self._ledger,
            self._frames,
            gradients,
            self._weights,
            suspecting=suspecting,
        )
