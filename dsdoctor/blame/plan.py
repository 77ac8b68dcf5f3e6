"""What a bisection of this case would look at, or why none could change the verdict."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from dsdoctor.blame.aside import relevant
from dsdoctor.blame.changes import Change, changes
from dsdoctor.blame.suspects import suspects
from dsdoctor.blame.verdict import decide
from dsdoctor.blame.view import View
from dsdoctor.case import Case
from dsdoctor.dsconfig.effective import Effective
from dsdoctor.finding import Finding

Depth = Literal["suspects", "automatic", "asked"]
"""`suspects` tries what lint suspects, `automatic` also searches where that may change the verdict, `asked` always."""
_OF_THE_OPTIMIZER = ("optimizer", "scheduler")
_STEPS_AFTER = 3
"""Steps that a run has to survive beyond the one in which the given config failed."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to try. `why_not` says why there is nothing to try, empty where there is.

    `steps` is how many optimizer steps a run needs to get safely past the failure, None for as many as the given run
    was asked for. `seen` counts how often the failure was seen in runs of the given config.
    """

    pool: tuple[Change, ...] = ()
    suspicions: tuple[Change, ...] = ()
    steps: int | None = None
    seen: int = 1
    why_not: str = ""


def plan(case: Case, findings: Sequence[Finding], depth: Depth) -> Plan:
    """Decide from what the legs have shown."""
    view = relevant(case, findings)
    if view.given is None or case.config is None:
        return Plan(why_not="no run to explain")
    if not view.given_failed:
        return Plan(why_not="nothing failed")
    blame = decide(case, findings).blame
    if blame == "environment":
        return Plan(why_not="the machine is to blame, whatever the config says")
    if view.root(lambda f: f.id == "version/known-defect") is not None and depth != "asked":
        return Plan(why_not="a known defect of this release explains it")
    suspicions = suspects(case, findings)
    pool = () if depth == "suspects" else tuple(_pool(view, blame, asked=depth == "asked"))
    if not suspicions and not pool:
        return Plan(why_not=_why_not(blame, depth))
    return Plan(pool=pool, suspicions=tuple(suspicions), steps=_steps(view), seen=_seen(view))


def _pool(view: View, blame: str, *, asked: bool) -> Iterable[Change]:
    """The changes that could explain this verdict.

    What the run without DeepSpeed shares cannot explain that only the run with it fails, and what it does not share
    cannot explain that both fail alike.
    """
    assert view.case.config is not None
    assert view.given is not None
    facts = view.given.facts
    every = changes(
        Effective.of(view.case.config), accumulation=facts.gradient_accumulation_steps if facts is not None else 1
    )
    if view.out_of_time:
        return ()
    if blame == "deepspeed":
        return [change for change in every if not _only_a_number(change)]
    if blame in ("script", "precision"):
        shared = [change for change in every if change.value and _can_matter(view, change)]
        return shared if asked else [change for change in shared if change.insane and _explains(change, blame)]
    return every if blame == "inconclusive" or asked else ()


def _explains(change: Change, blame: str) -> bool:
    """What fp32 does not mend is no matter of the loss scale, and what it mends none of the optimizer."""
    return (change.group in _OF_THE_OPTIMIZER) == (blame == "script")


def _only_a_number(change: Change) -> bool:
    """A number of the optimizer or the schedule; a whole section is more, as DeepSpeed may not take its class."""
    return change.value and change.group in _OF_THE_OPTIMIZER and not change.covers


def _can_matter(view: View, change: Change) -> bool:
    """The optimizer's and the schedule's numbers matter from the first step on, and never for an input."""
    if change.group not in _OF_THE_OPTIMIZER:
        return True
    health, bad = view.given_health, view.case.first_bad
    if bad is not None and (bad.phase == "input" or (bad.step == 0 and bad.phase != "step")):
        return False
    return health is not None and health.numeric and health.step != 0


def _why_not(blame: str, depth: Depth) -> str:
    if blame == "config":
        return "what is wrong in the config is known without it"
    if depth == "suspects":
        return "no key is suspected; --bisect tries them all"
    return "no key of the config could explain it" + ("" if depth == "asked" else " (--bisect tries them all the same)")


def _steps(view: View) -> int | None:
    """A loss scale takes its time to fall, so a run with one is not cut short."""
    health, given = view.given_health, view.given
    if health is None or given is None or (given.facts is not None and given.facts.dynamic_loss_scale):
        return None
    return (health.step or 0) + 1 + _STEPS_AFTER


def _seen(view: View) -> int:
    """The detector's run is the given config once more, and so is the plain run where it fails in the same way."""
    shown = view.case.first_bad is not None
    return 1 + shown + view.fails_alike
