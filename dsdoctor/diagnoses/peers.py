"""Which exceptions and endings are only the answer of a rank to the loss of another one."""

from __future__ import annotations

from dsdoctor.case import Case
from dsdoctor.diagnoses import context
from dsdoctor.diagnoses.forms import Form
from dsdoctor.diagnoses.processes import Ending, endings
from dsdoctor.runs.facts import Failure

PEER_FORMS = (
    Form(message=r"(?i)connection (?:was )?(?:closed|reset|refused) by (?:remote )?peer|remote process exited"),
    Form(message=r"(?i)\b(?:recv|send)(?:Bytes|Value|Vector)?(?: failed| error|\b.*(?:closed|reset|broken))"),
    Form(message=r"NCCL communicator was aborted|ncclRemoteError"),
    Form(
        message=r"store->get\('[^']*'\) got error: (?:Timeout waiting for key|wait timeout|Socket Timeout|Connection)"
    ),
    Form(message=r"(?:Store|c10d|gloo|NCCL).*(?:Broken pipe|Connection closed)"),
    Form(message=r"gloo/transport/.*(?:Read|Write) error|Application timeout caused pair closure"),
    Form(message=r"Watchdog caught collective operation timeout|Timed out waiting \d+ms for (?:recv|send) operation"),
)
"""What a rank raises because another one has gone away, or does not come."""


def is_peer_failure(failure: Failure) -> bool:
    """True for an exception that only says that another rank is gone."""
    return any(form.match(failure) is not None for form in PEER_FORMS)


def roots(case: Case, code: int) -> list[Ending]:
    """The processes that ended with this code by themselves, unless a rank had raised an exception of its own."""
    if any(not is_peer_failure(failure) for failure in context.failures(case)):
        return []
    return [ending for ending in endings(case) if ending.code == code and not ending.by_launcher]
