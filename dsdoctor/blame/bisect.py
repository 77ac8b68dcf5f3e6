"""Which keys of a ds_config turn fail into pass: delta debugging over groups of keys, then over keys.

The search goes from the given config toward one that passes. What is suspected already is tried first, each suspicion
on its own; then everything together, to see whether the config can be guilty at all; then `ddmin` finds the smallest
part of it that suffices. Nothing here starts a process: `runs` tells what came of a config.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dsdoctor.blame.changes import KEPT, RACES, Change
from dsdoctor.blame.ddmin import ddmin
from dsdoctor.blame.facts import Bisection, Rate, Trial, TrialKind
from dsdoctor.dsconfig import patch

_REPEATS = 3
"""Runs of a config that must all pass, once chance has been seen to play a part."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of one config. `seconds` is how long it took."""

    kind: TrialKind
    why: str = ""
    seconds: float = 0.0


class OutOfBudget(Exception):
    """Raised by `runs` where another run does not fit into the time that is left. The message says so."""


Runs = Callable[[Mapping[str, Any], tuple[str, ...], int], Outcome]
"""A run of a config, given the dotted keys that were changed in it and how many more runs the search needs at most."""


def bisect(
    given: Mapping[str, Any],
    pool: Sequence[Change],
    *,
    suspicions: Sequence[Change] = (),
    runs: Runs,
    seen: int = 1,
) -> Bisection:
    """Find the smallest change of `given`, which fails, that makes it pass.

    Args:
        given: the failing config.
        pool: the changes to search, those most often guilty first.
        suspicions: changes to be tried before, each alone; they need not be in the pool.
        runs: makes one run, or raises OutOfBudget.
        seen: how often the given config was seen to fail before. A failure that was seen once only, and that no trial
            shows again, may have been chance: then the given config is run again before a change is believed.
    """
    search = _Search(given, runs, seen)
    stopped = ""
    try:
        search.go(pool, suspicions)
    except OutOfBudget as end:
        stopped = str(end) or "the time was up"
    return search.result(pool, suspicions, stopped)


class _Search:
    """The state of one search: the samples of each config so far, and the smallest passing change."""

    def __init__(self, given: Mapping[str, Any], runs: Runs, seen: int) -> None:
        self._given = given
        self._runs = runs
        self._seen = seen
        self._need = 1
        self._offered = 0
        self._samples: dict[str, list[Outcome]] = {}
        self._trials: list[Trial] = []
        self._found: list[Change] = []
        self._minimal = self._verified = self._searched = False
        self._masked: dict[str, None] = {}

    def go(self, pool: Sequence[Change], suspicions: Sequence[Change]) -> None:
        self._offered = len(pool)
        self._narrow(pool, suspicions)
        if self._found and not self._verify() and self._need == 1:
            # It passed once and failed once: chance plays a part, so everything is asked more often.
            self._need, self._found, self._minimal = _REPEATS, [], False
            self._narrow(pool, suspicions)
            if self._found:
                self._verify()

    def _narrow(self, pool: Sequence[Change], suspicions: Sequence[Change]) -> None:
        alone = next(([change] for change in suspicions if self._passes([change])), None)
        if alone is not None:
            self._found, self._minimal = alone, True
            return
        whole = self._whole(pool)
        if whole is None:
            return
        self._found = whole
        groups = [[change for change in whole if change.group == name] for name in _in_order(c.group for c in whole)]
        kept = ddmin(groups, lambda some: self._accept([change for group in some for change in group]))
        self._found = ddmin([change for group in kept for change in group], self._accept)
        self._specialise(pool)
        self._weaken()
        self._minimal = True

    def _whole(self, pool: Sequence[Change]) -> list[Change] | None:
        """All changes together or, where they break something of their own, all but one group."""
        if not pool:
            return None
        self._searched = True
        if self._passes(pool):
            return list(pool)
        if self._samples[self._key(pool)][0].kind == "fails":
            return None
        for name in _in_order(change.group for change in pool):
            rest = [change for change in pool if change.group != name]
            if rest and self._passes(rest):
                return rest
        return None

    def _specialise(self, pool: Sequence[Change]) -> None:
        """Where a change covers others (a whole section, a stage and what needs it), see whether those suffice."""
        for change in list(self._found):
            inner = [other for other in pool if other is not change and _covers(change, other)]
            rest = [other for other in self._found if other is not change]
            if inner and self._accept([*rest, *inner]):
                self._found = ddmin([*rest, *inner], self._accept)

    def _weaken(self) -> None:
        """Take the form of each change that is nearest to the given config and passes still."""
        for change in list(self._found):
            for weaker in change.nearer:
                form = Change(keys=change.keys, patch=weaker, group=change.group, value=change.value)
                if self._accept([form if other is change else other for other in self._found]):
                    break

    def _verify(self) -> bool:
        """Run the found change once more, and the given config too where its failure may be a matter of chance."""
        chance = self._need > 1 or any(set(change.keys) & set(RACES) for change in self._found)
        times = _REPEATS if chance else 2
        if not self._passes(self._found, times):
            return False
        alone = self._seen == 1 and all(trial.kind == "passes" for trial in self._trials)
        again = self._again([], times - self._seen if chance or alone else 0)
        failed = self._seen + sum(outcome.kind != "passes" for outcome in again)
        self._verified = failed >= 2 or not (chance or alone)
        return True

    def _accept(self, changes: Sequence[Change]) -> bool:
        """Whether the changes suffice; the smallest that did is kept for a search that is cut short."""
        if not changes or not self._passes(changes):
            return False
        self._found = list(changes)
        return True

    def _passes(self, changes: Sequence[Change], times: int | None = None) -> bool:
        """Whether the changed config passes each of the times it is run; what was run already is not run again."""
        return all(outcome.kind == "passes" for outcome in self._until_it_fails(changes, times or self._need))

    def _until_it_fails(self, changes: Sequence[Change], times: int) -> list[Outcome]:
        samples = self._samples.setdefault(self._key(changes), [])
        while len(samples) < times and all(outcome.kind == "passes" for outcome in samples):
            samples.append(self._run(changes))
        return samples

    def _again(self, changes: Sequence[Change], times: int) -> list[Outcome]:
        samples = self._samples.setdefault(self._key(changes), [])
        while len(samples) < times:
            samples.append(self._run(changes))
        return samples

    def _run(self, changes: Sequence[Change]) -> Outcome:
        touched = tuple(_in_order(key for change in changes for key in change.keys))
        outcome = self._runs(changed(self._given, changes), touched, self._left())
        self._trials.append(Trial(changed=touched, kind=outcome.kind, why=outcome.why, seconds=outcome.seconds))
        if outcome.kind == "differs" and len(touched) == 1:
            self._masked[touched[0]] = None
        return outcome

    def _left(self) -> int:
        """How many more runs it takes, if one key is guilty: halving what is suspected, twice at each size."""
        suspected = len(self._found) if self._found else self._offered
        return 2 * math.ceil(math.log2(suspected + 1)) + self._need

    def _key(self, changes: Sequence[Change]) -> str:
        return json.dumps(changed(self._given, changes), sort_keys=True, default=str)

    def result(self, pool: Sequence[Change], suspicions: Sequence[Change], stopped: str) -> Bisection:
        keys = tuple(_in_order(key for change in self._found for key in change.keys))
        tried = {key for trial in self._trials for key in trial.changed}
        return Bisection(
            keys=keys,
            patch=patch.diff(self._given, changed(self._given, self._found)),
            verified=self._verified,
            minimal=self._minimal,
            searched=self._searched,
            trials=tuple(self._trials),
            given=self._rate([], failed_before=self._seen),
            changed=self._rate(self._found) if self._found else None,
            masked=tuple(self._masked) if not self._found else (),
            untried=_untried(self._given, [*suspicions, *pool], tried),
            stopped=stopped,
        )

    def _rate(self, changes: Sequence[Change], failed_before: int = 0) -> Rate:
        samples = self._samples.get(self._key(changes), [])
        failed = sum(outcome.kind != "passes" for outcome in samples)
        return Rate(failed=failed + failed_before, runs=len(samples) + failed_before)


def changed(config: Mapping[str, Any], changes: Sequence[Change]) -> dict[str, Any]:
    """The config with these changes; those that take whole sections away come last."""
    ordered = sorted(changes, key=lambda change: bool(change.covers))
    result = patch.apply(config, {})
    for change in ordered:
        result = patch.apply(result, change.patch)
    return result


def _covers(change: Change, other: Change) -> bool:
    """Whether `change` changes all that `other` does, as a part of more."""
    return all(any(key == cover or key.startswith(f"{cover}.") for cover in change.covers) for key in other.keys)


def _untried(given: Mapping[str, Any], offered: Sequence[Change], tried: set[str]) -> tuple[str, ...]:
    """What no run has changed: keys that the time did not suffice for, and what a bisection leaves alone."""
    left = _in_order(key for change in offered for key in change.keys if key not in tried)
    kept = [key for key in KEPT if _has(given, key)]
    words = [f"{', '.join(left)} (no run was made)"] if left else []
    return (*words, f"{', '.join(kept)} (left as they are)") if kept else tuple(words)


def _has(config: Mapping[str, Any], key: str) -> bool:
    node: Any = config
    for part in key.split("."):
        if not isinstance(node, Mapping) or part not in node:
            return False
        node = node[part]
    return True


def _in_order(names: Iterable[str]) -> list[str]:
    """Each once, in the order of its first appearance."""
    return list(dict.fromkeys(names))
