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
        message=r"got error: (?:Timeout waiting for key|wait timeout|Socket Timeout|Connection|Broken pipe"
        r"|[Ff]ailed to recv)"
    ),
    Form(message=r"[Ff]ailed to recv, got 0 bytes|Connection was likely closed"),
    Form(types=("RendezvousConnectionError",), frames=r":_call_store:"),
    Form(message=r"^wait timeout after \d+ms, keys|^Socket Timeout$"),
    Form(message=r"failed to pass monitoredBarrier|timed out in monitoredBarrier"),
    Form(message=r"(?:Store|c10d|gloo|NCCL).*(?:Broken pipe|Connection closed)"),
    Form(message=r"gloo/transport/.*(?:Read|Write) error|Application timeout caused pair closure"),
    Form(message=r"Watchdog caught collective operation timeout|Timed out waiting \d+ms for (?:recv|send) operation"),
)
"""What a rank raises because another one has gone away, or does not come."""


def is_peer_failure(failure: Failure) -> bool:
    """True for an exception that only says that another rank is gone."""
    return any(form.match(failure) is not None for form in PEER_FORMS)


def raised_itself(case: Case) -> bool:
    """True if a rank raised an exception in Python that is no answer to the loss of another one."""
    return any(f.type != context.NATIVE and not is_peer_failure(f) for f in context.failures(case))


def roots(case: Case, code: int) -> list[Ending]:
    """The processes that ended with this code by themselves, unless a rank had raised an exception of its own."""
    if raised_itself(case):
        return []
    return [ending for ending in endings(case) if ending.code == code and not ending.by_launcher]
