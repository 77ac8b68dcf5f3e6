"""Who is to blame: the rows of the contract as small rules, in its order of precedence.

The first rule that the evidence proves wins. A rule sees the findings and the judged runs; it never guesses: what no
rule proves is `inconclusive`, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dsdoctor.blame.health import Health, judge
from dsdoctor.case import Case
from dsdoctor.diagnoses.peers import is_peer_failure
from dsdoctor.finding import Blame, Finding, Verdict
from dsdoctor.frames import users_line
from dsdoctor.runs.facts import Failure, Run

_ENVIRONMENT = ("environment/", "comm/", "memory/", "build/", "disk/", "hardware/", "nvme/")
_ENVIRONMENT_IDS = {
    "launch/port-in-use",
    "launch/ssh-or-hostfile",
    "launch/launcher-missing",
    "launch/world-size-mismatch",
    "launch/sighup",
    "launch/cancelled",
    "numerics/dtype-unsupported",
    "version/incompatible",
    "version/rank-mismatch",
}
_NOT_THE_MACHINES = {"comm/collective-mismatch", "comm/rank0-work-timeout", "memory/bogus-allocation"}
"""Of those families, what the order of the ranks' own calls, or a corrupt size, brings about."""
_DEEPSPEED_IDS = {"version/known-defect", "deepspeed/internal-error"}
_CONFIG = ("config/", "zero3/", "loss-scale/static", "autograd/direct-backward")
_BEFORE_THE_RUN = ("environment", "memory")
_SCRIPT_IDS = {"launch/local-rank-mismatch"}
"""What only the script can mend, although the plain run, which makes no such check, passes."""


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
    def out_of_time(self) -> bool:
        """The time limit ended the run, and no rule shows that it stood still: it may only be slow."""
        ended = self.given_health is not None and self.given_health.trouble == "timeout"
        return ended and self.root(lambda f: f.id.startswith("hang/") or f.id in _NOT_THE_MACHINES) is None

    @property
    def low_precision(self) -> bool:
        return self.given is not None and self.given.facts is not None and self.given.facts.precision != "fp32"


def decide(case: Case, findings: Sequence[Finding]) -> Verdict:
    """The verdict over all that is known."""
    view = _view(case, findings)
    for rule in _RULES:
        verdict = rule(view)
        if verdict is not None:
            return verdict
    return _inconclusive(view)


def _view(case: Case, findings: Sequence[Finding]) -> View:
    given, plain, control = (case.run(leg) for leg in ("with-deepspeed", "without-deepspeed", "control-fp32"))
    plain = plain if plain is not None and not plain.not_played else None
    return View(
        roots=tuple(f for f in findings if f.role == "root" and f.severity == "error"),
        case=case,
        given=given,
        plain=plain,
        control=control,
        given_health=judge(given) if given else None,
        plain_health=judge(plain) if plain else None,
        control_health=judge(control) if control else None,
    )


def _environment(view: View) -> Verdict | None:
    """Ports, network, memory, disk, builds, versions. A run that passed refutes an estimate."""
    if view.given_passed:
        return None
    explained = view.given is not None and bool(view.given.failures) and view.root(_is_config) is not None
    finding = view.root(lambda f: _is_environment(f) and not (explained and _predicted(f)))
    return _blame("environment", view, finding.cause, finding.confidence) if finding else None


def _is_config(finding: Finding) -> bool:
    return finding.id.startswith(_CONFIG)


def _predicted(finding: Finding) -> bool:
    """It rests on the stages before the run alone; a run that raised for the config never came as far as that."""
    return bool(finding.evidence) and all(evidence.source in _BEFORE_THE_RUN for evidence in finding.evidence)


def _is_environment(finding: Finding) -> bool:
    family = finding.id.startswith(_ENVIRONMENT) and finding.id not in _NOT_THE_MACHINES
    return family or finding.id in _ENVIRONMENT_IDS


def _defect(view: View) -> Verdict | None:
    """A known defect of the installed release, or an error inside DeepSpeed that the plain run does not have."""
    finding = view.root(lambda f: f.id in _DEEPSPEED_IDS)
    return _blame("deepspeed", view, finding.cause, finding.confidence, finding.keys) if finding else None


def _config(view: View) -> Verdict | None:
    """Proved by a run that passes once only some keys are changed, or by lint. What was tried comes first."""
    proof = next((run for run in view.case.runs if run.leg == "proof" and not judge(run).failed), None)
    if proof is not None and view.given_failed:
        keys = " and ".join(proof.changed)
        text = f"the run fails as given and passes once only {keys} is changed"
        return _blame("config", view, text, 0.9, proof.changed)
    finding = view.root(_is_config)
    return _blame("config", view, finding.cause, finding.confidence, finding.keys) if finding else None


def _precision(view: View) -> Verdict | None:
    """Fails in the config's precision with and without DeepSpeed, passes in fp32."""
    if not (view.given_failed and view.low_precision and view.control_health is not None):
        return None
    if view.control_health.failed or not _numeric(view.given_health):
        return None
    if not (view.plain is None or (view.plain_failed and _numeric(view.plain_health))):
        return None
    precision = view.given.facts.precision if view.given and view.given.facts else "low precision"
    where = _where(view)
    both = "with and without DeepSpeed" if view.plain_failed else "with DeepSpeed"
    text = f"the run fails in {precision} {both} and passes in fp32{where}"
    return _blame("precision", view, text, 0.95 if view.plain_failed else 0.6)


def _script(view: View) -> Verdict | None:
    """Fails without DeepSpeed too (and in fp32, where the numbers went wrong)."""
    mistake = view.root(lambda f: f.id in _SCRIPT_IDS)
    if view.given_failed and mistake is not None:
        return _blame("script", view, mistake.cause, mistake.confidence)
    if not (view.given_failed and view.plain_failed) or view.out_of_time:
        return None
    numeric = _numeric(view.given_health) and _numeric(view.plain_health)
    if numeric and view.low_precision and not (view.control_health and view.control_health.failed):
        return None
    if not numeric and not _alike(view):
        return None
    why = view.given_health.why if view.given_health else ""
    finding = view.roots[0] if view.roots else None
    text = f"it fails with and without DeepSpeed{' and in fp32' if numeric and view.low_precision else ''}"
    detail = _where(view) if numeric else f": {finding.cause if finding else why}"
    return _blame("script", view, text + (detail or f": {why}"), 0.9)


def _deepspeed(view: View) -> Verdict | None:
    """Fails with DeepSpeed in every config tried and passes without it."""
    if not (view.given_failed and view.plain_passed and view.given_health) or view.out_of_time:
        return None
    text = f"the script passes without DeepSpeed and fails with it: {view.given_health.why}"
    return _blame("deepspeed", view, text, 0.6)


def _healthy(view: View) -> Verdict | None:
    if not view.given_passed or view.roots or view.given is None:
        return None
    steps = max((len(rank.steps) for rank in view.given.ranks), default=0)
    if steps == 0:
        return None
    if view.plain_failed and view.plain_health:
        text = f"nothing failed in {steps} steps with DeepSpeed; the plain run did fail ({view.plain_health.why})"
        return _blame("healthy", view, text, 0.6)
    also = " and without it" if view.plain_passed else ""
    return _blame("healthy", view, f"nothing failed in {steps} steps with DeepSpeed{also}", 0.9 if also else 0.8)


_RULES: tuple[Callable[[View], Verdict | None], ...] = (
    _environment,
    _defect,
    _config,
    _precision,
    _script,
    _deepspeed,
    _healthy,
)


def _inconclusive(view: View) -> Verdict:
    """The reason, and what would settle it."""
    if view.given is None:
        first = view.roots[0].cause if view.roots else "no run of the script was made"
        return _blame("inconclusive", view, first, 0.3)
    seen = view.given.why or "no optimizer step was seen"
    why = view.given_health.why if view.given_health and view.given_health.failed else seen
    if view.out_of_time:
        why += "; it may only be slow, which a longer --timeout would settle"
    elif not view.given_failed and view.roots:
        why = f"the steps that were run passed, but {view.roots[0].cause}"
    elif view.plain is None:
        why += "; the run without DeepSpeed, which would settle it, was not made or could not be played"
    elif view.plain_failed and view.plain_health and not _alike(view):
        why += f"; without DeepSpeed it fails otherwise ({view.plain_health.why})"
    return _blame("inconclusive", view, why, 0.3)


def _numeric(health: Health | None) -> bool:
    return health is not None and health.numeric


def _alike(view: View) -> bool:
    """Both legs fail in the same way: the same kind of trouble, on whichever rank.

    For exceptions it is the same type, or the same line of the user's code: DeepSpeed words some of torch's own.
    """
    one, other = view.given_health, view.plain_health
    if one is None or other is None:
        return False
    if one.trouble == other.trouble == "raised":
        mine, theirs = _own_failures(view.given), _own_failures(view.plain)
        same_type = {failure.type for failure in mine} & {failure.type for failure in theirs}
        return bool(same_type or _places(mine) & _places(theirs))
    stuck = {"hung", "timeout"}
    return one.trouble == other.trouble or {one.trouble, other.trouble} <= stuck


def _own_failures(run: Run | None) -> list[Failure]:
    """What its ranks raised by themselves; only if there is none, what they raised for lost peers."""
    failures = list(run.failures) if run is not None else []
    return [failure for failure in failures if not is_peer_failure(failure)] or failures


def _places(failures: Sequence[Failure]) -> set[tuple[str, int, int | None]]:
    """File, line and step of the user's code that they came through."""
    lines = ((users_line(failure.frames), failure.step) for failure in failures)
    return {(frame.file, frame.line, step) for frame, step in lines if frame is not None}


def _where(view: View) -> str:
    """The first non-finite value in words, if the detector found it."""
    bad = view.case.first_bad
    if bad is None:
        return ""
    place = f"{bad.module or 'the model'} ({bad.tensor})"
    return f"; the first {bad.kind} is in the {bad.phase} of {place}, step {bad.step}, rank {bad.rank}"


def _blame(blame: Blame, view: View, text: str, confidence: float, culprit: tuple[str, ...] = ()) -> Verdict:
    summary = text[:1].upper() + text[1:].rstrip(".") + "."
    bad = view.case.first_bad
    return Verdict(blame=blame, summary=summary, confidence=confidence, culprit=culprit, first_bad=bad)
