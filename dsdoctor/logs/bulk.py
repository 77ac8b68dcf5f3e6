"""Which lines of a block have to be read by themselves, when the repeated ones are read in bulk.

Of the steps in a block those are read whose values a series keeps, of the progress bars those that a line which is read
comes after. All others are only counted. What comes out is what reading every line would give.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import TYPE_CHECKING

from dsdoctor.logs.series import SeriesBuilder
from dsdoctor.logs.shapes import RANK, STEP, Bar, Maybe, Meaning, Meant, Step

HEAD = 4
"""Steps read at the head of a block while an exception may yet be cleared by progress."""
if TYPE_CHECKING:
    from dsdoctor.logs.columns import Column

DONE = re.compile(rb"%\|[^|]*\| *(\d+)/\d+ \[")
"""How many steps a progress bar shows done."""


@dataclass(frozen=True)
class Told:
    """The lines of a block that tell steps in one way, and in a long log what they tell, by name."""

    step: Step
    places: list[int]
    ranks: set[bytes] = field(default_factory=set)
    values: dict[str, Column] = field(default_factory=dict)


@dataclass
class Choice:
    """Lines of a block by index. `whole` are to be read as any; of `glanced` only the bar and the values matter."""

    whole: set[int] = field(default_factory=set)
    glanced: set[int] = field(default_factory=set)
    told: list[Told] = field(default_factory=list)

    @property
    def ranks(self) -> set[int]:
        """The ranks that told values."""
        return {int(rank) for told in self.told for rank in told.ranks}

    def passed(self, start: int, end: int) -> list[tuple[Step, int]]:
        """How many lines that tell values lie between two others."""
        if start >= end:
            return []
        counts = [(t.step, bisect_left(t.places, end) - bisect_left(t.places, start)) for t in self.told]
        return [(step, count) for step, count in counts if count]


def choose(
    meanings: Sequence[Meaning], texts: Sequence[bytes], series: dict[str, SeriesBuilder], *, whole_head: bool
) -> Choice:
    """The lines of a block that are to be read; `series` are the ones in the making, as they stand before it."""
    choice = Choice()
    bars: list[int] = []
    titled = False
    steps: dict[Step, list[int]] = {}
    sorts: dict[Meaning, list[int]] = defaultdict(list)
    for index, meaning in enumerate(meanings):
        sorts[meaning].append(index)
    sorts.pop(None, None)
    for meaning, places in sorts.items():
        bar = meaning.bar if type(meaning) is Step else meaning
        if type(bar) is Bar:
            bars = sorted(bars + places) if bars else places
            titled = titled or bar.titled
        if type(meaning) is Step:
            steps[meaning] = places
        elif type(meaning) is Maybe:
            choice.whole.update(at for at in places if any(literal in texts[at] for literal in meaning.literals))
        elif type(meaning) is Meant:
            choice.whole.update(places)
    for step, places in steps.items():
        _tell(step, places, texts, choice, series)
    choice.glanced = _kept(choice.told, series)
    if whole_head:
        choice.whole.update(bars[:HEAD], *(told.places[:HEAD] for told in choice.told))
    if bars:
        choice.glanced |= _before(bars, choice.whole | choice.glanced, meanings)
        choice.whole |= _turns(bars, texts, choice.whole | choice.glanced, titled=titled)
    if titled:
        choice.whole |= choice.glanced
    choice.glanced -= choice.whole
    return choice


def _before(bars: list[int], chosen: set[int], meanings: Sequence[Meaning]) -> set[int]:
    """The bar before each of these lines, unless there is one in it: it says their step."""
    led = (type(meaning) is Step and (meaning.led or meaning.numbered) for meaning in map(meanings.__getitem__, chosen))
    places = (bisect_left(bars, index) for index, itself in zip(chosen, led, strict=True) if not itself)
    return {bars[place - 1] for place in places if place}


def _tell(
    step: Step, places: list[int], texts: Sequence[bytes], choice: Choice, series: dict[str, SeriesBuilder]
) -> None:
    """Find the values of all lines that tell steps in this way, unless they are so few that each is looked at."""
    told = Told(step, places)
    if all(name == STEP or (name in series and series[name].thinned) for name in step.names):
        from dsdoctor.logs.columns import Lines

        lines = Lines([texts[index] for index in places])
        try:
            for name, where in step.fields:
                if name == RANK:
                    told.ranks.update(lines.distinct(where))
                else:
                    told.values[name] = lines.column(where)
        except ValueError:
            choice.whole.update(places)  # not all are what the first one was: one by one, then
            return
    choice.whole.add(places[-1])
    choice.told.append(told)


def _kept(told: list[Told], series: dict[str, SeriesBuilder]) -> set[int]:
    """The lines of the values that a series keeps."""
    kept = {index for part in told if not part.values for index in part.places}
    orders: dict[tuple[int, ...], list[int]] = {}
    for name in {name for part in told for name in part.values}:
        builder = series[name]
        parts = tuple(at for at, part in enumerate(told) if name in part.step.names)
        if parts not in orders:
            orders[parts] = sorted(chain.from_iterable(told[at].places for at in parts))
        order = orders[parts]
        kept.update(order[at] for at in builder.wanted(len(order)))
        for part in told:
            if name in part.values:
                column = part.values[name]
                kept.update(part.places[at] for at in column.non_finite()[: builder.room_for_non_finite])
                kept.update(part.places[at] for at in column.beyond(builder.widened_by))
    return kept


def _turns(bars: list[int], texts: Sequence[bytes], chosen: set[int], *, titled: bool) -> set[int]:
    """The last bar, and those around which the count does not just go on: another epoch, or another bar."""
    turns = {bars[-1]}
    first, last = DONE.findall(texts[bars[0]]), DONE.findall(texts[bars[-1]])
    if titled or len(first) > 1 or len(last) > 1 or int(last[-1]) - int(first[0]) < len(bars) - 1:
        done = [(int(figure), index) for index in bars for figure in DONE.findall(texts[index])]
        for (before, at), (after, following) in pairwise(done):
            if after < before:
                turns.update((at, following))
        turns.add(max(done)[1])
    if titled:
        turns.add(bars[0])
        turns.update(bars[at] for index in chosen if (at := bisect_left(bars, index + 1)) < len(bars))
    return turns
