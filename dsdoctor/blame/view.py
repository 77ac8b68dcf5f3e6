"""What the rules of the verdict look at: the findings that count, the legs, and the judgement of each leg."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dsdoctor.blame.compare import diverged, nondeterministic
from dsdoctor.blame.facts import Bisection
from dsdoctor.blame.health import Health, judge
from dsdoctor.blame.signature import alike
from dsdoctor.case import Case
from dsdoctor.finding import Finding
from dsdoctor.runs.facts import Run

NOT_THE_MACHINES = {"comm/collective-mismatch", "comm/rank0-work-timeout", "memory/bogus-allocation"}
"""Of the families that blame the machine, what the order of the ranks' own calls, or a corrupt size, brings about."""


@dataclass(frozen=True, kw_only=True)
class View:
    """What the rules look at: error roots, the legs, and the judgement of each leg (None where it was not run)."""

    roots: tuple[Finding, ...]
    case: Case
    given: Run | None
    plain: Run | None
    control: Run | None
    given_health: Health | None
    plain_health: Health | None
    control_health: Health | None

    def root(self, matches: Callable[[Finding], bool]) -> Finding | None:
        return next((finding for finding in self.roots if matches(finding)), None)

    @property
    def given_failed(self) -> bool:
        return self.given_health is not None and self.given_health.failed

    @property
    def given_passed(self) -> bool:
        return self.given_health is not None and not self.given_health.failed

    @property
    def plain_failed(self) -> bool:
        return self.plain_health is not None and self.plain_health.failed

    @property
    def plain_passed(self) -> bool:
        return self.plain_health is not None and not self.plain_health.failed

    @property
    def fails_alike(self) -> bool:
        """It fails without DeepSpeed too, and in the same way."""
        return self.given is not None and self.plain is not None and alike(self.given, self.plain)

    @property
    def out_of_time(self) -> bool:
        """The time limit ended the run, and no rule shows that it stood still: it may only be slow."""
        ended = self.given_health is not None and self.given_health.trouble == "timeout"
        return ended and self.root(lambda f: f.id.startswith("hang/") or f.id in NOT_THE_MACHINES) is None

    @property
    def proof(self) -> Bisection | None:
        """A change of the config that was seen to make it pass, time and again; None without one."""
        found = self.case.bisection
        return found if found is not None and found.verified and found.keys and self.given_failed else None

    @property
    def compared_in_vain(self) -> bool:
        """The legs differ in their numbers, and the run without DeepSpeed does not even agree with itself."""
        return nondeterministic(self.case) and (self.given_passed or is_numeric(self.given_health))

    @property
    def low_precision(self) -> bool:
        return self.given is not None and self.given.facts is not None and self.given.facts.precision != "fp32"


def view_of(case: Case, findings: Sequence[Finding]) -> View:
    """What is known, judged. A leg that the plain engine could not play counts as not made."""
    given, plain, control = (case.run(leg) for leg in ("with-deepspeed", "without-deepspeed", "control-fp32"))
    plain = plain if plain is not None and not plain.not_played else None
    return View(
        roots=tuple(f for f in findings if f.role == "root" and f.severity == "error"),
        case=case,
        given=given,
        plain=plain,
        control=control,
        given_health=_health(given, case) if given else None,
        plain_health=judge(plain) if plain else None,
        control_health=judge(control) if control else None,
    )


def _health(given: Run, case: Case) -> Health:
    own = judge(given)
    return own if own.failed else diverged(case) or own


def is_numeric(health: Health | None) -> bool:
    """The run failed by its numbers."""
    return health is not None and health.numeric


def too_big(run: Run | None) -> bool:
    """The run ended for want of memory. Without DeepSpeed that is no failure: ZeRO would have saved it."""
    if run is None:
        return False
    said = any("OutOfMemoryError" in f.type or "out of memory" in f.message.lower() for f in run.failures)
    killed = run.outcome in ("killed", "out-of-memory") and run.oom_kills > 0
    return said or killed or run.outcome == "out-of-memory"
