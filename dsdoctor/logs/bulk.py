"""Which segments of a block have to be read by themselves, when the repeated ones are read in bulk.

Of the steps in a block those are read whose values a series keeps, of the progress bars those that a segment which is
read comes after. All others are only counted. What comes out is what reading every segment would give.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import merge
from itertools import pairwise

from dsdoctor.logs.series import SeriesBuilder
from dsdoctor.logs.shapes import Bar, Column, Maybe, Meaning, Step, columns

HEAD = 4
"""Steps read at the head of a block while an exception may yet be cleared by progress."""
_DONE = re.compile(rb"%\|[^|]*\| *(\d+)/\d+ \[")


@dataclass
class Choice:
    """Segments to read, in order, by index; `steps` are those whose values are read in bulk, by the names in them."""

    chosen: list[int] = field(default_factory=list)
    steps: list[tuple[tuple[str, ...], list[int]]] = field(default_factory=list)
    ranks: set[int] = field(default_factory=set)

    def passed(self, start: int, end: int) -> list[tuple[tuple[str, ...], int]]:
        """How many steps lie between two segments, by the names in them."""
        counts = ((names, bisect_left(places, end) - bisect_left(places, start)) for names, places in self.steps)
        return [(names, count) for names, count in counts if count]


def choose(
    meanings: Sequence[Meaning], texts: Sequence[bytes], series: dict[str, SeriesBuilder], *, whole_head: bool
) -> Choice:
    """The segments of a block that are to be read; `series` are the ones in the making, as they stand before it."""
    choice = Choice()
    chosen: set[int] = set()
    bars: list[int] = []
    titled = False
    led: set[int] = set()
    groups: dict[Step, list[int]] = {}
    for meaning in set(meanings) - {None}:
        places = [index for index, other in enumerate(meanings) if other is meaning]
        bar = meaning.bar if type(meaning) is Step else meaning
        if type(bar) is Bar:
            bars = list(merge(bars, places)) if bars else places
            titled = titled or bar.titled
        if type(meaning) is Step:
            groups[meaning] = places
            led.update(places if meaning.led else ())
        elif type(meaning) is Maybe:
            chosen.update(at for at in places if any(literal in texts[at] for literal in meaning.literals))
        elif bar is meaning and type(meaning) is not Bar:
            chosen.update(places)
    chosen.update(_steps(groups, texts, series, choice))
    if whole_head:
        chosen.update(bars[:HEAD], *(places[:HEAD] for _, places in choice.steps))
    if bars:
        chosen.update(_before(bars, chosen - led))
        chosen.update(_turns(bars, texts, chosen, titled=titled))
    choice.chosen = sorted(chosen)
    return choice


def _before(bars: list[int], chosen: set[int]) -> set[int]:
    """The bar before each of these lines: it says their step."""
    return {bars[at - 1] for index in chosen if (at := bisect_left(bars, index))}


def _steps(
    groups: dict[Step, list[int]], texts: Sequence[bytes], series: dict[str, SeriesBuilder], choice: Choice
) -> set[int]:
    """Read the values of all steps, and choose the segments of those that a series has to keep."""
    chosen: set[int] = set()
    told: dict[str, list[tuple[list[int], Column]]] = {}
    for step, places in groups.items():
        rows = step.pattern.findall(b"\n".join([texts[index] for index in places]))
        if len(rows) != len(places):
            chosen.update(places)  # not all are what the first one was: one by one, then
            continue
        choice.steps.append((step.names, places))
        chosen.add(places[-1])
        if step.ranked:
            choice.ranks.update(map(int, {row[0] for row in rows}))
        for name, column in columns(step, rows).items():
            told.setdefault(name, []).append((places, column))
    for name, parts in told.items():
        builder = series.get(name)
        chosen.update(_kept(parts, builder if builder is not None else SeriesBuilder(name)))
    return chosen


def _kept(parts: list[tuple[list[int], Column]], builder: SeriesBuilder) -> set[int]:
    """Segments of the values of one series that it keeps."""
    order = parts[0][0] if len(parts) == 1 else list(merge(*(places for places, _ in parts)))
    kept = {order[at] for at in builder.wanted(len(order))}
    for places, column in parts:
        kept.update(places[at] for at in column.non_finite()[: builder.room_for_non_finite])
        kept.update(places[at] for at in column.beyond(builder.widened_by))
    return kept


def _turns(bars: list[int], texts: Sequence[bytes], chosen: set[int], *, titled: bool) -> set[int]:
    """The last bar, and those around which the count does not just go on: another epoch, or another bar."""
    turns = {bars[-1]}
    first, last = _DONE.findall(texts[bars[0]]), _DONE.findall(texts[bars[-1]])
    if titled or len(first) > 1 or len(last) > 1 or int(last[-1]) - int(first[0]) < len(bars) - 1:
        done = [(int(figure), index) for index in bars for figure in _DONE.findall(texts[index])]
        for (before, at), (after, following) in pairwise(done):
            if after < before:
                turns.update((at, following))
        turns.add(max(done)[1])
    if titled:
        turns.add(bars[0])
        turns.update(bars[at] for index in chosen if (at := bisect_left(bars, index + 1)) < len(bars))
    return turns
