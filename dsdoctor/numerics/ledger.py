"""Keeps the suspicions of a rank in the order of time and decides which is the first bad value. Rank processes only.

A non-finite value is not a fault in itself: masks hold -inf, a branch that is thrown away may hold NaN, and a dynamic
loss scale overflows on purpose. So a value is only suspected when it is seen, and judged when its backward has ended:
it is the fault if the loss or a gradient went bad in the same micro-step, and of no account if both stayed finite.
Where only gradients went bad while a loss scale is searched, the judgement waits for what the search finds.
"""

from __future__ import annotations

from dataclasses import replace

from dsdoctor.numerics.events import Event, Origin, Place

_LIMIT = 16
"""Suspicions kept of one micro-step; the first ones are those that matter."""


class Ledger:
    """Suspicions of one rank. The methods return the first bad value once it is certain, else None."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self._open: list[Event] = []
        self._waiting: list[Event] = []
        self._harmless: set[Place] = set()
        self._seen_fine: set[Place] = set()

    def suspect(self, event: Event) -> None:
        """Take note of a value seen before or during forward."""
        if len(self._open) < _LIMIT:
            self._open.append(event)

    def explain(self, event: Event, origin: Origin) -> None:
        """Add what a second run of the module showed; a value that was written on purpose is no suspicion."""
        if origin.deliberate:
            self.excuse(event.place)
        self._open = [
            known.explained(origin) if known.place == event.place else known
            for known in self._open
            if not (known.place == event.place and origin.deliberate)
        ]

    def became_nan(self, place: str) -> None:
        """A NaN is seen at `place`: if an inf was born before, this is where it first shows as NaN."""
        for index, event in enumerate(self._open):
            if event.kind == "inf" and event.turned is None:
                self._open[index] = replace(event, turned=place)

    def excuse(self, place: Place) -> None:
        """What is seen at this place is meant to be there."""
        self._harmless.add(place)

    def is_harmless(self, place: Place) -> bool:
        """Whether a value at this place was seen before in a step that went well."""
        return place in self._harmless

    def earliest(self, *, strong_only: bool = False) -> Event | None:
        """The first suspicion that is still open; a weak one only if there is no other, or if that was made of it."""
        strong = next((e for e in self._open if not e.weak and not self.is_harmless(e.place)), None)
        if strong is not None and strong.origin.of_input and strong.origin.cause == "inf-minus-inf":
            strong = next((e for e in self._open if e.weak and e.phase == "input"), strong)
        if strong is not None or strong_only:
            return strong
        return self._open[0] if self._open else None

    def forget(self) -> None:
        """Drop what is open."""
        self._open.clear()

    def bad_loss(self, loss: Event) -> Event:
        """The loss is not finite: an earlier suspicion explains it, else it is the first bad value itself."""
        return self.earliest(strong_only=True) or loss

    def backward_went_well(self) -> None:
        """Loss and gradients are finite: what was suspected in this micro-step did no harm."""
        self._harmless |= {event.place for event in self._open}
        self._seen_fine |= {event.place for event in self._open}
        self._open.clear()

    def bad_gradient(self, gradient: Event, *, searching: bool) -> Event | None:
        """A gradient is not finite. While a loss scale is searched only an explained suspicion is certain."""
        suspect = self.earliest() or gradient
        explained = suspect is not gradient and not suspect.weak and suspect.origin.op is not None
        if explained or not searching:
            return self._since(suspect)
        self._waiting.append(suspect)
        self._open.clear()
        return None

    def step_overflowed(self, reduction: Event | None, *, searching: bool) -> Event | None:
        """The engine calls the step non-finite. `reduction` is given if every gradient of this rank was finite."""
        self._seen_fine.clear()
        if reduction is None:
            return None
        if not searching:
            return self._since(reduction)
        self._waiting.append(reduction)
        return None

    def step_went_well(self) -> Event | None:
        """The step was applied: the search found a scale, and what waited for it was the scale, or did harm once.

        A suspicion of forward that came back in this good step is harmless. One that did not was part of the bad step.
        """
        waiting = [e for e in self._waiting if e.phase in ("input", "parameter", "forward") and not e.weak]
        fault = next((e for e in waiting if e.place not in self._seen_fine), None)
        self._waiting.clear()
        self._seen_fine.clear()
        return fault

    def search_failed(self, reduction: Event | None) -> Event | None:
        """The engine gave up at its lowest loss scale: what waited for the search was no matter of scale."""
        last = reduction or (self._waiting[-1] if self._waiting else None)
        return None if last is None else self._since(last)

    def _since(self, event: Event) -> Event:
        """The same trouble's first sight in the unbroken run of overflows that ends with `event`."""
        return next((e for e in self._waiting if e.place == event.place), event)
