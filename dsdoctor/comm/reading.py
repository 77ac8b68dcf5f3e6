"""What a communication check means: which ranks are the cause, and of what kind. Pure.

Only one rank's story is told: what the others report (a connection closed, a collective that never ends) follows from
it. Who is at fault when all wait is read from where each one stands: ranks inside a collective wait, the rank that is
not there is the one they wait for.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

from dsdoctor.comm.facts import CommFacts, CommRank, CommStep
from dsdoctor.comm.members import twice, world_sizes

Kind = Literal[
    "passed",
    "apart",
    "not-started",
    "wrong-value",
    "failed",
    "missing",
    "lost",
    "died",
    "mismatch",
    "stopped",
    "stalled",
    "unreachable",
]

_FOLLOWS_FROM_A_PEER = re.compile(
    r"closed by peer|connection reset|broken pipe|remote process|ncclRemoteError|communicator was aborted"
    r"|failed to recv|likely closed|MissingRanks",
    re.IGNORECASE,
)
_CANNOT_CONNECT = re.compile(
    r"connectFullMesh|connection refused|no route to host|network is unreachable|client socket has (?:failed|timed out)"
    r"|connect(?:ion)? timed out|timed out after \d+ ?\w* waiting for clients|ConnectionRefused",
    re.IGNORECASE,
)

_CALL = re.compile(r"torch[\\/]distributed[\\/]distributed_c10d\.py\", line \d+, in (?!wrapper)(\w+)")
"""The outermost frame in torch's collectives, in a stack whose innermost frame comes last."""
_WAITS = re.compile(r"torch[\\/]distributed[\\/]|, in wait_for_device\n")
"""On a GPU a collective is only queued by its call, and waited for by `Group.wait_for_device`."""


@dataclass(frozen=True, kw_only=True)
class CommReading:
    """`ranks` are those at fault, `step` is where the first of them stands.

    For `unreachable` they are those that wait, for `mismatch` two that call different things in one step. `apart`: the
    ranks were not let go, since the nodes cannot connect or do not fit together; the facts say which.
    """

    kind: Kind
    ranks: tuple[CommRank, ...] = ()

    @property
    def step(self) -> CommStep | None:
        return self.ranks[0].trouble if self.ranks else None


def read(facts: CommFacts) -> CommReading:
    """The root of what went wrong in the check."""
    if facts.passed:
        return CommReading(kind="passed")
    if facts.cannot_meet or facts.broken_links or twice(facts.members) or world_sizes(facts.members):
        return CommReading(kind="apart")
    if all(rank.ending == "never-started" for rank in facts.ranks):
        return CommReading(kind="not-started", ranks=facts.ranks)
    for rule in (_wrong, _failed, _lost, _gone, _missing, _stopped, _mismatch, _stalled):
        reading = rule(facts.ranks)
        if reading is not None:
            return reading
    return CommReading(kind="unreachable", ranks=tuple(rank for rank in facts.ranks if not rank.healthy))


def _wrong(ranks: tuple[CommRank, ...]) -> CommReading | None:
    found = tuple(rank for rank in ranks if any(step.status == "wrong-value" for step in rank.steps))
    return CommReading(kind="wrong-value", ranks=found) if found else None


def _failed(ranks: tuple[CommRank, ...]) -> CommReading | None:
    """An exception that does not follow from another rank's end; the earliest."""
    own = [rank for rank in ranks if _failure(rank) and not _FOLLOWS_FROM_A_PEER.search(_failure(rank))]
    if not own:
        return None
    first = min(own, key=lambda rank: rank.time or 0.0)
    if not _CANNOT_CONNECT.search(_failure(first)):
        return CommReading(kind="failed", ranks=(first,))
    reading = _lost(ranks) or _gone(ranks) or _missing(ranks)
    return reading or CommReading(kind="unreachable", ranks=tuple(own))


def _failure(rank: CommRank) -> str:
    return next((step.text for step in rank.steps if step.status == "failed"), "")


def _lost(ranks: tuple[CommRank, ...]) -> CommReading | None:
    """Ranks of whose node nothing was heard any more, after all had met."""
    found = tuple(rank for rank in ranks if rank.ending == "lost")
    return CommReading(kind="lost", ranks=found) if found else None


def _gone(ranks: tuple[CommRank, ...]) -> CommReading | None:
    """A process that ended without a word, by itself: killed from outside, crashed, or left by an exit call."""
    died = tuple(rank for rank in ranks if rank.ending == "died")
    arrived = tuple(rank for rank in died if rank.arrived)
    if arrived:
        return CommReading(kind="died", ranks=arrived)
    return CommReading(kind="missing", ranks=died) if died else None


def _missing(ranks: tuple[CommRank, ...]) -> CommReading | None:
    """Ranks that never came to the rendezvous, while another one waits there."""
    absent = tuple(rank for rank in ranks if not _came(rank))
    return CommReading(kind="missing", ranks=absent) if absent and len(absent) < len(ranks) else None


def _came(rank: CommRank) -> bool:
    return any(step.name == "rendezvous" for step in rank.steps)


def _stopped(ranks: tuple[CommRank, ...]) -> CommReading | None:
    found = tuple(rank for rank in ranks if rank.ending == "stopped")
    return CommReading(kind="stopped", ranks=found) if found else None


def _mismatch(ranks: tuple[CommRank, ...]) -> CommReading | None:
    """Two ranks that waited in the same step, in different collectives, until a deadline or the other's end.

    Different steps prove nothing: a rank may leave a collective while another one is still inside it.
    """
    inside = [rank for rank in ranks if rank.trouble is not None and called(rank)]
    for one, other in combinations(inside, 2):
        if len(one.steps) == len(other.steps) and _differ(one, other):
            return CommReading(kind="mismatch", ranks=(one, other))
    return None


def _differ(one: CommRank, other: CommRank) -> bool:
    """They call different collectives, by what is known of both in the same way: names of the two ways differ."""
    known = [(tell(one), tell(other)) for tell in (_by_stack, _by_recorder)]
    return next((mine != theirs for mine, theirs in known if mine and theirs), False)


def called(rank: CommRank) -> str:
    """The collective that the rank's last step stands in, by its stack or torch's flight recorder; empty for none."""
    return _by_stack(rank) or _by_recorder(rank)


def _by_stack(rank: CommRank) -> str:
    found = _CALL.search(rank.steps[-1].stack) if rank.steps else None
    return found[1] if found else ""


def _by_recorder(rank: CommRank) -> str:
    return next(iter(rank.calls), "")


def _stalled(ranks: tuple[CommRank, ...]) -> CommReading | None:
    """Ranks that stand still outside of the collectives, where the others may wait for them."""
    busy = tuple(rank for rank in ranks if not (rank.healthy or _failure(rank) or _waits(rank)))
    return CommReading(kind="stalled", ranks=busy) if busy else None


def _waits(rank: CommRank) -> bool:
    """Its last step was not over, and its stack is inside torch's collectives (or the meeting at the store)."""
    last = rank.steps[-1] if rank.steps else None
    return last is not None and last.status in ("timeout", "unfinished") and _WAITS.search(last.stack) is not None
