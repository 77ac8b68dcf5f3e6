"""Who is to blame: the rows of the contract as small rules, in its order of precedence.

The first rule that the evidence proves wins. A rule sees the findings and the judged runs; it never guesses: what no
rule proves is `inconclusive`, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dsdoctor.blame import replayed
from dsdoctor.blame.aside import relevant
from dsdoctor.blame.facts import Bisection
from dsdoctor.blame.families import is_config, is_environment
from dsdoctor.blame.signature import own_failures
from dsdoctor.blame.view import View, is_numeric, too_big
from dsdoctor.case import Case
from dsdoctor.diagnoses.internal import is_check
from dsdoctor.finding import Blame, Finding, Verdict
from dsdoctor.runs.facts import Failure

_DEEPSPEED_IDS = {"version/known-defect", "deepspeed/internal-error"}
_SCRIPT_IDS = {"launch/local-rank-mismatch", "script/step-before-backward"}
"""What only the script can mend, although the plain run, which makes no such check, passes."""


def decide(case: Case, findings: Sequence[Finding]) -> Verdict:
    """The verdict over all that is known."""
    view = relevant(case, findings)
    for rule in _RULES:
        verdict = rule(view)
        if verdict is not None:
            return verdict
    return _inconclusive(view)


def _environment(view: View) -> Verdict | None:
    """Ports, network, memory, disk, builds, versions. A run that passed refutes an estimate."""
    finding = None if view.given_passed else view.root(is_environment)
    return _blame("environment", view, finding.cause, finding.confidence) if finding else None


def _defect(view: View) -> Verdict | None:
    """A known defect of the installed release, or an error inside DeepSpeed that the plain run does not have.

    Where it was refused with a message and a key makes it pass, the message was the answer to that key.
    """
    refused = view.proof is not None and any(is_check(failure) for failure in _failures(view))
    ids = {"version/known-defect"} if refused else _DEEPSPEED_IDS
    finding = view.root(lambda f: f.id in ids)
    if finding is None:
        return None
    keys = finding.keys or (view.proof.keys if view.proof is not None else ())
    return _blame("deepspeed", view, finding.cause, finding.confidence, keys)


def _failures(view: View) -> list[Failure]:
    return own_failures(view.given) if view.given is not None else []


def _config(view: View) -> Verdict | None:
    """Proved by a run that passes once only some keys are changed, or by lint. What was tried comes first."""
    proof = view.proof
    if proof is not None:
        keys = " and ".join(proof.keys)
        rate = f" (it failed {proof.given} times as given, {proof.changed} changed)" if _by_chance(proof) else ""
        text = f"the run fails as given and passes once only {keys} {_are(proof.keys)} changed{rate}"
        return _blame("config", view, text, 0.9 if proof.minimal else 0.7, proof.keys)
    finding = view.root(is_config)
    return _blame("config", view, finding.cause, finding.confidence, finding.keys) if finding else None


def _by_chance(proof: Bisection) -> bool:
    return proof.given is not None and proof.given.runs > 1 and proof.changed is not None and proof.changed.runs > 2


def _are(keys: Sequence[str]) -> str:
    return "is" if len(keys) == 1 else "are"


def _precision(view: View) -> Verdict | None:
    """Fails in the config's precision with and without DeepSpeed, passes in fp32."""
    if not (view.given_failed and view.low_precision and view.control_health is not None):
        return None
    if view.control_health.failed or not (view.given_health and view.given_health.of_the_precision):
        return None
    if not (view.plain is None or view.fails_alike):
        return None
    precision = view.given.facts.precision if view.given and view.given.facts else "low precision"
    where = _where(view) or (f": {view.given_health.why}" if view.given_health.refused_type else "")
    both = "with and without DeepSpeed" if view.plain_failed else "with DeepSpeed"
    text = f"the run fails in {precision} {both} and passes in fp32{where}"
    return _blame("precision", view, text, 0.95 if view.plain_failed else 0.6)


def _script(view: View) -> Verdict | None:
    """Fails without DeepSpeed too (and in fp32, where the numbers went wrong)."""
    mistake = view.root(lambda f: f.id in _SCRIPT_IDS)
    if view.given_failed and mistake is not None:
        return _blame("script", view, mistake.cause, mistake.confidence)
    if not (view.given_failed and view.plain_failed) or view.out_of_time or _starts_ranks(view) is not None:
        return None
    numeric = is_numeric(view.given_health) and is_numeric(view.plain_health)
    if numeric and view.low_precision and not (view.control_health and view.control_health.failed):
        return None
    if not numeric and not view.fails_alike:
        return None
    why = view.given_health.why if view.given_health else ""
    finding = view.roots[0] if view.roots else None
    text = f"it fails with and without DeepSpeed{' and in fp32' if numeric and view.low_precision else ''}"
    detail = _where(view) if numeric else f": {finding.cause if finding else why}"
    return _blame("script", view, text + (detail or f": {why}"), 0.9)


def _starts_ranks(view: View) -> Finding | None:
    """It is made for a start without a launcher, so that none of our runs is the user's."""
    return view.root(lambda f: f.id == "launch/own-ranks")


def _deepspeed(view: View) -> Verdict | None:
    """Fails with DeepSpeed in every config tried and passes without it."""
    if not (view.given_failed and view.plain_passed and view.given_health) or view.out_of_time:
        return None
    tried = view.case.bisection
    if view.compared_in_vain or (tried is not None and tried.comes_and_goes):
        return None
    if tried is not None and tried.nothing_passes:
        text = (
            "the script passes without DeepSpeed and fails with it, also with every key changed that may be changed: "
        )
        return _blame("deepspeed", view, text + view.given_health.why, 0.8)
    text = f"the script passes without DeepSpeed and fails with it: {view.given_health.why}"
    return _blame("deepspeed", view, text, 0.6)


def _replayed(view: View) -> Verdict | None:
    """What the flagged micro-batch alone proves, where no other leg was run that would decide."""
    found = replayed.proof(view.case.first_bad, view.case.examined)
    numeric = view.given is None or is_numeric(view.given_health)
    if found is None or not numeric or view.plain_passed or view.out_of_time:
        return None
    blame, text, confidence = found
    return _blame(blame, view, text + _where(view), confidence)


def _healthy(view: View) -> Verdict | None:
    if not view.given_passed or view.roots or view.given is None:
        return None
    steps = view.given.steps_made
    if steps == 0:
        return None
    if view.plain_failed and view.plain_health:
        reason = (
            "the model does not fit" if too_big(view.plain) else f"the plain run did fail ({view.plain_health.why})"
        )
        return _blame("healthy", view, f"nothing failed in {steps} steps with DeepSpeed; without it {reason}", 0.6)
    if view.compared_in_vain:
        text = f"nothing failed in {steps} steps; the losses say no more, as the script does not repeat them"
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
    _replayed,
    _healthy,
)


def _inconclusive(view: View) -> Verdict:
    """The reason, and what would settle it."""
    if view.given is None:
        first = view.roots[0].cause if view.roots else "no run of the script was made"
        return _blame("inconclusive", view, first, 0.3)
    seen = view.given.why or "no optimizer step was seen"
    why = view.given_health.why if view.given_health and view.given_health.failed else seen
    return _blame("inconclusive", view, why + _what_would_settle(view), 0.3)


def _what_would_settle(view: View) -> str:
    if view.out_of_time:
        return "; it may only be slow, which a longer --timeout would settle"
    if (own := _starts_ranks(view)) is not None:
        return f"; {own.cause}"
    if not view.given_failed and view.roots:
        return f"; the steps that were run passed, but {view.roots[0].cause}"
    if view.plain is None:
        return "; the run without DeepSpeed, which would settle it, was not made or could not be played"
    tried = view.case.bisection
    if tried is not None and tried.comes_and_goes:
        return f"; but it failed in {tried.given} runs as given, and no change of a key explains that: run it again"
    if view.compared_in_vain:
        return "; but the run without DeepSpeed does not repeat its own losses: compare again with fixed seeds (--seed)"
    if too_big(view.plain):
        return f"; the model does not fit without ZeRO, so there is nothing to compare with: {_NEXT_BEST}"
    if view.plain_failed and view.plain_health and not view.fails_alike:
        return f"; without DeepSpeed it fails otherwise ({view.plain_health.why})"
    return ""


_NEXT_BEST = "try a lower ZeRO stage (blame --bisect does), fewer layers (--shrink), or the CPU (--device cpu)"


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
