"""What the always-on watch recorded, read and put into the words of the ledger: a story for each batch. Plain data."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from dsdoctor.finding import Phase
from dsdoctor.numerics.causes import explain_gradient
from dsdoctor.numerics.events import Event, Origin
from dsdoctor.numerics.gradients import Activation, Weight
from dsdoctor.numerics.stats import type_name


class Note(NamedTuple):
    """What a row is about. `cast` marks an input that an engine cast, `loss` a loss among the root's outputs."""

    phase: Phase
    module: str
    tensor: str
    dtype: torch.dtype
    batch: int
    micro_step: int
    owner: Activation | Weight | None = None
    cast: bool = False
    loss: bool = False


@dataclass(frozen=True, slots=True)
class Reading:
    """A row as it was read: smallest and largest value. `order` counts the rows of a step."""

    note: Note
    order: int
    low: float
    high: float

    @property
    def kind(self) -> str | None:
        """inf or nan (which hides an inf), None where all values are finite."""
        if math.isnan(self.low) or math.isnan(self.high):
            return "nan"
        return "inf" if math.isinf(self.low) or math.isinf(self.high) else None

    @property
    def only_minus(self) -> bool:
        """Whether -inf is all that keeps the tensor from being finite."""
        return self.low == -math.inf and self.high < math.inf

    @property
    def largest(self) -> float:
        """The largest magnitude."""
        return max(abs(self.low), abs(self.high))

    def _like_mask(self) -> bool:
        """Whether it may be a mask: -inf and nothing above zero where a block made it, any lone -inf in the batch."""
        return self.only_minus and (self.note.phase == "input" or (self.note.phase == "forward" and self.high == 0))

    def event(self, step: int) -> Event:
        """The reading as a suspicion; a gradient is charged to the module that used the value."""
        note = self.note
        module, tensor = note.owner.blamed() if note.owner is not None else (note.module, note.tensor)
        origin = Origin()
        if note.phase == "input":
            origin = Origin(cause="cast-overflow" if note.cast else "bad-input")
        return Event(
            step=step,
            micro_step=note.micro_step,
            phase=note.phase,
            module=module,
            tensor=tensor,
            kind=self.kind or "",
            dtype=type_name(note.dtype),
            batch=note.batch,
            order=self.order,
            origin=origin,
            weak=self._like_mask(),
        )


@dataclass(slots=True)
class Story:
    """One batch: what was bad before and during its forward, its loss, and the first bad one of its gradients."""

    suspicions: list[Event] = field(default_factory=list)
    loss: Event | None = None
    output_bad: bool = False
    gradients: int = 0
    gradient: Event | None = None


def stories(readings: Iterable[Reading], step: int) -> list[Story]:
    """The batches of one optimizer step, in the order in which they began."""
    found: dict[int, tuple[Story, list[float]]] = {}
    for reading in readings:
        story, largest = found.setdefault(reading.note.batch, (Story(), [0.0]))
        if reading.note.phase == "backward":
            story.gradients += 1
            if reading.kind is None:
                largest[0] = max(largest[0], reading.largest)
            elif story.gradient is None:
                origin = explain_gradient(reading.kind, reading.note.dtype, largest[0])
                story.gradient = reading.event(step).explained(origin)
        elif reading.kind is not None:
            _forward(story, reading, step)
    return [story for story, _ in found.values()]


def _forward(story: Story, reading: Reading, step: int) -> None:
    event = reading.event(step)
    if reading.note.phase == "loss":
        story.loss = story.loss or event
        return
    story.suspicions.append(event)
    if reading.note.loss:
        story.loss = story.loss or event
    story.output_bad |= reading.note.module == "" and reading.note.phase == "forward" and reading.kind == "nan"
