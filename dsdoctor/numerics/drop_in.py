"""`DebugUnderflowOverflow`: the class of Transformers by the same name, without its blind spots. Rank processes only.

Same arguments, same text for what that class lists. What differs: keyword inputs, members of any container and buffers
are listed too; bools, empty, meta and float8 tensors do no harm; a deliberate mask is no alarm; gradients are watched;
a tensor with NaN keeps its range; memory is bounded whatever is traced; batch numbers are right; `remove()` exists.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from dsdoctor.finding import Phase
from dsdoctor.numerics import engines
from dsdoctor.numerics.batches import Batches, Call
from dsdoctor.numerics.events import Event
from dsdoctor.numerics.forward import ForwardWatch
from dsdoctor.numerics.frames import FrameLog, hit_text, starting_lines
from dsdoctor.numerics.gradients import GradientWatch, MeasuredGradients
from dsdoctor.numerics.hooks import BatchLimitReached, NonFiniteFound
from dsdoctor.numerics.ledger import Ledger
from dsdoctor.numerics.stats import Range, type_name
from dsdoctor.numerics.weights import WeightWatch


class DebugUnderflowOverflow:
    """Prints the last frames and raises at the first inf or NaN in a weight, input, output or gradient.

    `trace_batch_nums` are batches (from 0) that are printed frame by frame instead, without detection;
    after batch `abort_after_batch_num` a ValueError ends the run. Attached at once; `remove()` takes everything back.
    """

    def __init__(
        self,
        model: nn.Module,
        max_frames_to_save: int = 21,
        trace_batch_nums: Sequence[int] | None = None,
        abort_after_batch_num: int | None = None,
    ) -> None:
        self.model = engines.user_model(model)
        if engines.is_compiled(model):
            warnings.warn(
                "compiled code runs without the hooks of DebugUnderflowOverflow: give it the model as it was before "
                "torch.compile, or use dsdoctor.attach, which compiled code reports to if it is attached first",
                stacklevel=2,
            )
        self.trace_batch_nums = list(trace_batch_nums or [])
        self.abort_after_batch_num = abort_after_batch_num
        self.batch_number = -1
        self.problems: list[str] = []
        self._frames = FrameLog(max_frames_to_save)
        self._ledger = Ledger()
        self._done = False
        self._low_precision = any(p.dtype is torch.float16 for p in self.model.parameters())
        self._batches = Batches(self.model, self)
        self._measured = MeasuredGradients(self._bad_gradient)
        self._gradients = GradientWatch(self._measured.look, self.problem)
        self._watch = ForwardWatch(
            self.model,
            self,
            self._batches,
            self._ledger,
            self._frames,
            self._gradients,
            WeightWatch(),
            inference=True,
        )

    def remove(self) -> None:
        """Remove every hook. A second call does nothing."""
        self._watch.detach()
        self._gradients.detach()
        self._batches.detach()

    # ------------------------------------------------------------------ what the hooks tell

    def event(self, phase: Phase, module: str, tensor: str, kind: str, dtype: torch.dtype) -> Event:
        """A suspicion; only its batch counts here."""
        return Event(
            step=max(self.batch_number, 0),
            micro_step=0,
            phase=phase,
            module=module,
            tensor=tensor,
            kind=kind,
            dtype=type_name(dtype),
            batch=self.batch_number,
        )

    def batch_begins(self, *, training: bool, call: Call | None) -> None:
        """The number of the batch that runs goes up."""
        self.batch_number += 1
        self._done = False
        self._ledger.forget()
        self._watch.reset()
        self._measured.reset()
        self._frames.announce(starting_lines(self.batch_number))
        autocast = engines.autocast_in_force()
        self._low_precision |= autocast is not None and autocast[1] is torch.float16

    def batch_ended(self, output: Any, *, raised: bool) -> None:
        """End the run here if that was asked.

        Raises:
            BatchLimitReached: this was the last batch to run.
        """
        limit = self.abort_after_batch_num
        if limit is not None and self.batch_number >= limit and not raised:
            raise BatchLimitReached(
                f"DebugUnderflowOverflow: aborting after {self.batch_number + 1} batches due to"
                f" `abort_after_batch_num={limit}` arg"
            )

    def frame_taken(self) -> None:
        """Print the frame of a traced batch; else stop at a bad value.

        Raises:
            NonFiniteFound: this frame, or the one before, holds the first one.
        """
        if self.batch_number in self.trace_batch_nums:
            print(self._frames.take()[-1].text())
            self._ledger.forget()
        elif self._ledger.earliest(strong_only=True) is not None:
            self._stop()

    def problem(self, error: Exception) -> None:
        """A failure of our own never ends the user's run."""
        self.problems.append(f"{type(error).__name__}: {error}")

    def _bad_gradient(self, module: str, tensor: str, found: Range, dtype: torch.dtype, largest: float) -> None:
        """A gradient went bad after a good forward; an inf in fp16 may be a loss scale that is being searched."""
        if self._low_precision or self.batch_number in self.trace_batch_nums:
            return
        place = f"{module}: {tensor}" if module else tensor
        print(f"{place} has {'nans' if 'nan' in (found.kind or '') else 'infs'}")
        self._stop()

    def _stop(self) -> None:
        if self._done:
            return
        self._done = True
        for row in self._frames.last()[-1].rows:
            for kind in row.kinds():
                print(f"{row.label} has {kind}s")
        print(f"\n{hit_text(self._frames.take(), self.batch_number)}\n\n\n")
        raise NonFiniteFound(
            "DebugUnderflowOverflow: inf/nan detected, aborting as there is no point running further. "
            "Please scroll up above this traceback to see the activation values prior to this event."
        )
