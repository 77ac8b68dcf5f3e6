"""What the search over changed configs has proved."""

from __future__ import annotations

from collections.abc import Iterator

from dsdoctor.blame.facts import Bisection, Trial
from dsdoctor.case import Case
from dsdoctor.diagnoses.base import Diagnosis
from dsdoctor.finding import Evidence, Finding, Fix

_MOST_TRIALS = 6


class GuiltyKey(Diagnosis):
    """The job fails as its ds_config stands, and passes once only these keys are changed.

    What it is: dsdoctor ran the script with changed copies of the ds_config and kept the smallest change with which it
    passes. Of keys that fail only together, one is named.

    What proves it: runs that fail with the key and pass without it, and one more run of the changed config. What code
    running beside the backward pass breaks (overlap_comm and its kin), it breaks by chance; then both configs are run
    several times and the rates are told.

    When it could be wrong: a change can also hide a fault of the script, for example by slowing down a divergence; a
    failure that comes after the steps that were run is not seen. A value outside the usual range that is named here is
    the likelier the reason the further outside it is.

    What to do: apply the patch, then ask whether the key is needed at all. If it should work, report it upstream.
    """

    id = "config/guilty-key"
    severity = "error"
    title = "the config passes once these keys are changed"

    def examine(self, case: Case) -> Iterator[Finding]:
        found = case.bisection
        if found is None or not found.verified or not found.keys:
            return
        keys = ", ".join(found.keys)
        yield self.finding(
            cause=f"the script fails with the given config and passes once {keys} {_is(found)} changed",
            evidence=tuple(_evidence(trial) for trial in _telling(found)),
            confidence=0.9 if found.minimal else 0.7,
            caveat=_caveat(found),
            fixes=(Fix(text="apply the smallest change that passes", patch=found.patch),),
            keys=found.keys,
        )


def _is(found: Bisection) -> str:
    return "is" if len(found.keys) == 1 else "are"


def _telling(found: Bisection) -> list[Trial]:
    """The runs of the change itself, then those that failed with most of the config changed."""
    own = [trial for trial in found.trials if set(trial.changed) == set(found.keys)]
    failed = sorted((t for t in found.trials if t.kind == "fails"), key=lambda t: -len(t.changed))
    return [*own, *failed][:_MOST_TRIALS]


def _evidence(trial: Trial) -> Evidence:
    what = f"with {', '.join(trial.changed)} changed" if trial.changed else "as given, once more"
    return Evidence(source="bisect", text=f"{what}: {trial.kind}{f', {trial.why}' if trial.why else ''}")


def _caveat(found: Bisection) -> str | None:
    words = []
    if found.given is not None and found.changed is not None and found.changed.runs > 2:
        words.append(f"It failed {found.given} times as given and {found.changed} times changed.")
    if found.stopped:
        words.append(f"The search ended early: {found.stopped}.")
    if found.untried:
        words.append(f"Not tried: {'; '.join(found.untried)}.")
    return " ".join(words) or None


DIAGNOSES: tuple[Diagnosis, ...] = (GuiltyKey(),)
