"""Nodes of one job that do not agree: on the number of ranks, or on the versions of what they run."""

from __future__ import annotations

from collections.abc import Iterator

from dsdoctor.case import Case
from dsdoctor.diagnoses import context, nodes
from dsdoctor.diagnoses.base import Diagnosis
from dsdoctor.diagnoses.forms import MAX_EVIDENCE, Form, TextDiagnosis
from dsdoctor.diagnoses.peers import is_peer_failure
from dsdoctor.diagnoses.rendezvous import WAITED_IN_VAIN
from dsdoctor.diagnoses.timeouts import timed_out
from dsdoctor.finding import Evidence, Finding, Fix
from dsdoctor.logs.facts import LogEvent
from dsdoctor.runs.facts import Failure

_VERSIONS = {"nccl-version": "nccl", "torch-version": "torch", "deepspeed-version": "deepspeed"}
_OF_NCCL = Form(message=r"NCCL error|ncclInternalError|ncclInvalidUsage|ncclSystemError|ncclRemoteError")


class WorldSizeMismatch(TextDiagnosis):
    """The nodes were started for different numbers of ranks.

    What it is: one node was given another number of nodes or GPUs (`--num_nodes`, `--nnodes`, a hostfile that differs,
    WORLD_SIZE of an older shell). It waits for ranks that will never come, or its own ranks have numbers too high.

    What proves it: launchers that print different world sizes in one job that then waits in vain at the rendezvous; or
    a message about a rank beyond the world size.

    When it could be wrong: a log that holds two attempts of different size one after the other.

    What to do: start every node with the same number of nodes and processes; make `slots=` of the hostfile the same.
    """

    id = "launch/world-size-mismatch"
    severity = "error"
    title = "the nodes disagree on the number of ranks"
    forms = (
        Form(message=r"Invalid rank requested|[Ii]nvalid rank \d+|rank \d+ .*(?:>=|greater|exceeds).*world.?size"),
        Form(message=r"(?i)world.?size (?:mismatch|does not match|\d+ .* other ranks)"),
    )
    cause = "a rank has a number that the world size of another node does not allow"
    confidence = 0.8
    fixes = (Fix(text="start every node with the same --nnodes/--num_nodes and number of processes (hostfile slots)"),)

    def examine(self, case: Case) -> Iterator[Finding]:
        yield from nodes.world_sizes(self, case)
        yield from super().examine(case)
        sizes = _sizes(case)
        waited = [failure for failure in context.failures(case) if WAITED_IN_VAIN.match(failure) is not None]
        if len(sizes) > 1 and (waited or timed_out(case)):
            told = " and ".join(sorted(sizes, key=int))
            yield self.finding(
                cause=f"launchers of one job speak of {told} ranks, and it then waits in vain for ranks",
                evidence=(*(event.evidence() for event in sizes.values()), *map(context.evidence, waited))[
                    :MAX_EVIDENCE
                ],
                confidence=0.8,
                caveat="Two attempts of different size in one log look the same.",
                fixes=self.fixes,
            )


class VersionMismatch(Diagnosis):
    """The nodes run different releases of NCCL, torch or DeepSpeed.

    What it is: an image or environment was updated on some nodes only. The ranks then exchange messages that the other
    side reads differently, which ends in truncated messages, internal errors, or a hang.

    What proves it: hosts or ranks that print different versions in a job that fails in communication.

    When it could be wrong: versions that differ in what is not used by the job do no harm; a second environment that is
    only mentioned is no rank.

    What to do: the same image on every node. `dsdoctor env` prints what a node has.
    """

    id = "version/rank-mismatch"
    severity = "error"
    title = "the nodes run different versions"

    def examine(self, case: Case) -> Iterator[Finding]:
        yield from nodes.versions(self, case)
        trouble = _communication_failed(case)
        if case.logs is None or not trouble:
            return
        cut = [event.evidence() for event in case.logs.of_kind("nccl-truncated")]
        for kind, name in _VERSIONS.items():
            odd = _two_versions(list(case.logs.of_kind(kind)), name)
            if odd is not None:
                told = " and ".join(f"{event.fields[name]} on {_who(event)}" for event in odd)
                yield self.finding(
                    cause=f"{name} is {told}, and the ranks fail to understand each other",
                    evidence=(*(event.evidence() for event in odd), *cut[:1], *trouble)[:MAX_EVIDENCE],
                    confidence=0.85,
                    fixes=(
                        Fix(text="run the same image or environment on every node (dsdoctor env shows what one has)"),
                    ),
                )
                return


def _sizes(case: Case) -> dict[str, LogEvent]:
    """World sizes that launchers named before any step, with the first line of each."""
    sizes: dict[str, LogEvent] = {}
    for event in case.logs.of_kind("world-size") if case.logs is not None else ():
        if "size" in event.fields and event.step is None:
            sizes.setdefault(event.fields["size"], event)
    return sizes


def _communication_failed(case: Case) -> tuple[Evidence, ...]:
    failed = [f for f in context.failures(case) if _communicates(f)]
    return tuple(map(context.evidence, failed)) or timed_out(case)


def _communicates(failure: Failure) -> bool:
    return is_peer_failure(failure) or any(f.match(failure) is not None for f in (WAITED_IN_VAIN, _OF_NCCL))


def _two_versions(events: list[LogEvent], name: str) -> tuple[LogEvent, LogEvent] | None:
    """Lines of two hosts (or ranks) with different versions."""
    for other in events[1:]:
        if other.fields[name] != events[0].fields[name] and _who(other) != _who(events[0]):
            return events[0], other
    return None


def _who(event: LogEvent) -> str:
    if event.fields.get("process"):
        return f"process {event.fields['process']}"
    return f"rank {event.rank}" if event.rank is not None else event.source


DIAGNOSES: tuple[Diagnosis, ...] = (WorldSizeMismatch(), VersionMismatch())
