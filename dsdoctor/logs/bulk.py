"""Which lines of a block have to be read by themselves, when the repeated ones are read in bulk.

Of the steps in a block those are read whose values a series keeps, and those around which a counter of skipped steps
moves; of the progress bars those that a line which is read comes after; of what is only counted the first and the last
of each rank. All others are only counted. What comes out is what reading every line would give.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from dsdoctor.logs.block import Array, Block
from dsdoctor.logs.columns import Column, Lines, changes
from dsdoctor.logs.rows import LinePattern
from dsdoctor.logs.series import SeriesBuilder
from dsdoctor.logs.shapes import DONE, RANK, SCALE, SKIPPED, STEP, Bar, Maybe, Meaning, Meant, Step
from dsdoctor.logs.timeline import MIN_COUNTS

HEAD = 4
"""Steps read at the head of a block while an exception may yet be cleared by progress."""

FEW = 16
"""Lines of a kind that are not worth arrays."""
_HIGH = 16
"""Integers this many times as high as they are many are not counted by an array."""


@dataclass
class Told:
    """The lines of a block that tell steps in one way: their places, and in a long log what they tell, by name.

    `ranks` are the ranks that prefixes name, and where what is only counted is told, the places of each; None stands
    for lines without such a prefix.
    """

    step: Step
    places: Array
    values: dict[str, Column] = field(default_factory=dict)
    ranks: dict[int | None, Array] = field(default_factory=dict)


@dataclass
class Choice:
    """Lines of a block by index. `whole` are to be read as any; of `glanced` only the bar and the values matter."""

    whole: set[int] = field(default_factory=set)
    glanced: set[int] = field(default_factory=set)
    told: list[Told] = field(default_factory=list)

    def ordered(self) -> tuple[list[int], list[list[tuple[Step, int]]]]:
        """The lines to be read in order, and what tells values and is passed before each, and after the last one."""
        order = sorted(self.whole | self.glanced)
        passed: list[list[tuple[Step, int]]] = [[] for _ in range(len(order) + 1)]
        for told in self.told:
            before = np.searchsorted(told.places, order).tolist()
            ours = np.isin(order, told.places, assume_unique=True).tolist()
            done = 0
            for at, (count, itself) in enumerate(zip(before, ours, strict=True)):
                if count > done:
                    passed[at].append((told.step, count - done))
                done = count + itself
            if done < len(told.places):
                passed[-1].append((told.step, len(told.places) - done))
        return order, passed

    def ranks(self) -> set[int]:
        """The ranks that prefixes name."""
        return {rank for told in self.told for rank in told.ranks if rank is not None}

    def counted(self, end: int) -> Iterator[tuple[LinePattern, int | None, int]]:
        """What is only counted, by row and rank, and how often it stands before `end` in lines that are not read."""
        for told in self.told:
            for rank, places in told.ranks.items() if told.step.events else ():
                before = places[: np.searchsorted(places, end)]
                unread = len(before) - int(np.isin(before, list(self.whole)).sum())
                yield from ((row, rank, unread) for row in told.step.events if unread)


def choose(
    block: Block, start: int, meanings: list[Meaning], series: dict[str, SeriesBuilder], *, whole_head: bool
) -> Choice:
    """The lines of a block from `start` on that are to be read; `series` are the ones in the making before it."""
    choice = Choice()
    barred: list[Array] = []
    stepping: list[Array] = []
    titled = False
    numbers = block.numbers[start:]
    for number in np.flatnonzero(np.bincount(numbers)).tolist():
        meaning = meanings[number]
        if meaning is None:
            continue
        places = np.flatnonzero(numbers == number) + start
        bar = meaning.bar if type(meaning) is Step else meaning
        if type(bar) is Bar:
            barred.append(places)
            titled = titled or bar.titled
        if type(meaning) is Step:
            choice.told.append(Told(meaning, places))
            stepping += [places] if meaning.numbered and meaning.bar is None else []
        elif type(meaning) is Maybe:
            choice.whole.update(
                at for at in places.tolist() if any(literal in block.text(at) for literal in meaning.literals)
            )
        elif type(meaning) is Meant:
            choice.whole.update(places.tolist())
    bars, steppers = _merged(barred), _merged(barred + stepping)
    choice.told = [told for told in choice.told if _tell(told, block, choice, series)]
    choice.glanced = _kept(choice.told, series)
    if whole_head:
        choice.whole.update(bars[:HEAD].tolist(), *(told.places[:HEAD].tolist() for told in choice.told))
    if len(steppers):
        choice.glanced |= _before(steppers, choice.whole | choice.glanced, block, meanings)
    if len(bars):
        choice.whole |= _turns(bars, block, choice.whole | choice.glanced, titled=titled)
    if titled:
        choice.whole |= choice.glanced
    choice.glanced -= choice.whole
    return choice


def _merged(places: list[Array]) -> Array:
    return places[0] if len(places) == 1 else np.sort(np.concatenate((np.zeros(0, np.int64), *places)))


def _before(steppers: Array, chosen: Collection[int], block: Block, meanings: list[Meaning]) -> set[int]:
    """The line that says a step before each of these, unless it says its own."""
    lines = np.array([at for at in chosen if not _says_step(meanings[block.numbers[at]])], np.int64)
    places = np.searchsorted(steppers, lines)
    return set(steppers[places[places > 0] - 1].tolist())


def _says_step(meaning: Meaning) -> bool:
    return type(meaning) is Step and meaning.steps


def _tell(told: Told, block: Block, choice: Choice, series: dict[str, SeriesBuilder]) -> bool:
    """Find what these lines tell; False if each is to be read, since not all are what the first one was."""
    step, places = told.step, told.places
    if len(places) < FEW and step.series and not step.events and not {SKIPPED, SCALE} & set(step.names):
        choice.whole.add(int(places[-1]))
        return True
    lines = Lines(block, places)
    fields = dict(step.fields)
    try:
        told.ranks = _ranks(told, lines.integers(fields[RANK])) if step.ranked else {None: places}
        if STEP in fields:
            steps = lines.integers(fields[STEP])
            back = np.flatnonzero(steps[1:] < steps[:-1])
            choice.whole.update(places[back].tolist(), places[back + 1].tolist())
        if SKIPPED in step.names or SCALE in step.names:
            choice.whole.update(_moved(step, lines, places, told.ranks))
        if all(name in series and series[name].thinned for name in step.series):
            told.values = {name: lines.column(fields[name]) for name in step.series}
    except ValueError:
        choice.whole.update(places.tolist())
        return False
    if step.events:
        choice.whole.update(end for ranks in told.ranks.values() for end in (int(ranks[0]), int(ranks[-1])))
    choice.whole.add(int(places[-1]))
    return True


def _ranks(told: Told, ranks: Array) -> dict[int | None, Array]:
    different = np.flatnonzero(np.bincount(ranks)) if ranks.max() < _HIGH * len(ranks) else np.unique(ranks)
    events = bool(told.step.events)
    return {rank: told.places[ranks == rank] if events else told.places for rank in different.tolist()}


def _moved(step: Step, lines: Lines, places: Array, ranks: dict[int | None, Array]) -> set[int]:
    """The first lines, and those around which a counter of skipped steps, or the loss scale, moves.

    Raises ValueError where several ranks have a counter each.
    """
    if len(ranks) > 1:
        raise ValueError("each rank has a counter of its own")
    fields = dict(step.fields)
    counted = [lines.integers(fields[SKIPPED])] if SKIPPED in fields else []
    scaled = [lines.texts(fields[SCALE])] if SCALE in fields else []
    moves = (places[changes(texts)] for texts in (*counted, *scaled))
    return {at for moved in (places[: MIN_COUNTS + 1], *moves) for at in moved.tolist()}


def _kept(told: list[Told], series: dict[str, SeriesBuilder]) -> set[int]:
    """The lines of the values that a series keeps."""
    kept = {at for part in told if part.step.series and not part.values for at in part.places.tolist()}
    orders: dict[tuple[int, ...], Array] = {}
    for name in {name for part in told for name in part.values}:
        builder = series[name]
        parts = tuple(at for at, part in enumerate(told) if name in part.step.series)
        if parts not in orders:
            orders[parts] = np.sort(np.concatenate([told[at].places for at in parts]))
        order = orders[parts]
        kept.update(order[list(builder.wanted(len(order)))].tolist())
        for part in told:
            if name in part.values:
                column = part.values[name]
                kept.update(part.places[column.non_finite()[: builder.room_for_non_finite]].tolist())
                kept.update(part.places[column.beyond(builder.widened_by)].tolist())
    return kept


def _turns(bars: Array, block: Block, chosen: set[int], *, titled: bool) -> set[int]:
    """The first and the last bar, and those around which the count does not just go on: another epoch or bar."""
    turns = {int(bars[0]), int(bars[-1])}
    first, last = DONE.findall(block.text(bars[0])), DONE.findall(block.text(bars[-1]))
    if titled or len(first) > 1 or len(last) > 1 or int(last[-1]) - int(first[0]) < len(bars) - 1:
        done = [(int(figure), at) for at in bars.tolist() for figure in DONE.findall(block.text(at))]
        for (before, at), (after, following) in pairwise(done):
            if after < before:
                turns.update((at, following))
        turns.add(max(done)[1])
    if titled:
        turns.add(int(bars[0]))
        after_chosen = np.searchsorted(bars, np.array(sorted(chosen), np.int64) + 1)
        turns.update(bars[after_chosen[after_chosen < len(bars)]].tolist())
    return turns
