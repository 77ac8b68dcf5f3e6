"""Errors of DeepSpeed itself."""

from __future__ import annotations

from collections.abc import Iterator

from dsdoctor.blame.health import judge
from dsdoctor.case import Case
from dsdoctor.diagnoses import context
from dsdoctor.diagnoses.base import Diagnosis
from dsdoctor.diagnoses.explained import explained
from dsdoctor.diagnoses.forms import users_lines
from dsdoctor.diagnoses.peers import is_peer_failure
from dsdoctor.finding import Finding, Fix
from dsdoctor.frames import caller_of_torch, owner
from dsdoctor.runs.facts import Failure

_CHECK_TYPES = {
    "AssertionError",
    "ValueError",
    "NotImplementedError",
    "DeepSpeedConfigError",
    "ZeRORuntimeException",
    "ValidationError",
    "PipelineError",
}
"""How DeepSpeed refuses what it was asked for; with a message, that is an answer to the user and no defect."""


class InternalError(Diagnosis):
    """DeepSpeed fails inside its own code with a model that plain PyTorch trains.

    What it is: the innermost line of the traceback is DeepSpeed's (or torch's, called from there), and it is not one of
    its checks of what the user asked for: complex or zero-dimensional parameters, for instance, end in an error of that
    kind in 0.19.8.

    What proves it: the traceback, and the same script passing without DeepSpeed. From a log alone it is an assumption,
    made only where the innermost line itself is DeepSpeed's.

    When it could be wrong: wrong arguments can fail deep inside, too, without a proper message.

    What to do: read what the line works on; try the newest release (`pip install -U deepspeed` in an environment of its
    own), or another ZeRO stage; `dsdoctor triage` proves it by a run without DeepSpeed. Report it upstream with the
    traceback and `ds_report`.
    """

    id = "deepspeed/internal-error"
    severity = "error"
    title = "DeepSpeed failed inside its own code"

    def _holds(self, failure: Failure, case: Case) -> bool:
        place = caller_of_torch(failure.frames)
        if place is None or owner(place) != "deepspeed" or explained(failure, case):
            return False
        if context.own_run(case) is None:
            return place is failure.frames[-1] and not is_check(failure)
        plain = case.run("without-deepspeed")
        return plain is not None and not plain.not_played and not judge(plain).failed

    def examine(self, case: Case) -> Iterator[Finding]:
        own = next((failure for failure in context.failures(case) if not is_peer_failure(failure)), None)
        place = caller_of_torch(own.frames) if own is not None else None
        if own is None or place is None or not self._holds(own, case):
            return
        proved = context.own_run(case) is not None
        yield self.finding(
            cause=f"DeepSpeed raised {own.type} in {place.file}:{place.line} ({place.function})"
            + (", and the same script passes without DeepSpeed" if proved else ""),
            evidence=(context.evidence(own), *users_lines(own)),
            confidence=(0.6 if is_check(own) else 0.85) if proved else 0.5,
            caveat=None if proved else "A log alone cannot show that the script passes without DeepSpeed.",
            fixes=(
                Fix(text="try the newest DeepSpeed release and another ZeRO stage"),
                Fix(text="report it upstream with this traceback and a small script"),
            ),
        )


def is_check(failure: Failure) -> bool:
    """True if DeepSpeed refused something with a message for the user."""
    return failure.type.rpartition(".")[2] in _CHECK_TYPES and bool(failure.message.strip())


DIAGNOSES: tuple[Diagnosis, ...] = (InternalError(),)
