"""A job that stands still in its very first collective although every rank is there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from dsdoctor.case import Case
from dsdoctor.diagnoses import context, nodes
from dsdoctor.diagnoses.comm_check import as_of_the_job
from dsdoctor.diagnoses.forms import MAX_EVIDENCE, Form, TextDiagnosis
from dsdoctor.diagnoses.timeouts import FIRST_COLLECTIVES, silent_ranks, timed_out, timeouts
from dsdoctor.finding import Evidence, Finding, Fix
from dsdoctor.frames import passes_through
from dsdoctor.logs.facts import LogEvent

_IN_COLLECTIVE = r"distributed[/\\]distributed_c10d\.py|deepspeed[/\\]comm[/\\]"
_WITHOUT_PEER_ACCESS = re.compile(r"RTX ?(?:3090|40\d\d|50\d\d|PRO|A\d000|6000)|L40|A40\b")


class P2pHang(TextDiagnosis):
    """The first collective never ends on any rank: the GPUs cannot write into each other's memory as NCCL thinks.

    What it is: NCCL connects GPUs of one machine peer to peer (over PCIe or NVLink). With IOMMU or ACS switched on,
    some drivers, or consumer cards without peer access, data sent that way never arrives. Every rank has started, the
    communicator is complete, and the first all-reduce, broadcast or barrier runs for ever with the GPUs at 100 %. Some
    pairs of cards refuse at once ("peer access is not supported between these two devices").

    What proves it: every rank times out in the same one of the first collectives, before any step, and NCCL said that
    it uses P2P (or the cards are of a kind without it); or the user stopped a job that stood in a collective right
    after NCCL had connected by P2P. The test is a run with `NCCL_P2P_DISABLE=1` that gets on.

    When it could be wrong: a network between nodes that lets nothing through looks the same, as does a rank that works
    alone before the first collective (that one does not time out itself).

    What to do: run once with `NCCL_P2P_DISABLE=1`. If that cures it, leave it on (shared memory is used instead), or
    switch off ACS/IOMMU in the BIOS (`amd_iommu=off` or `iommu=pt` on the kernel's command line) and update the driver.
    `nvidia-smi topo -p2p r` shows which pairs claim to have access.
    """

    id = "comm/p2p-hang"
    severity = "error"
    title = "the first collective between GPUs never ends"
    forms = (
        Form(types=("NotImplementedError",), message=r"doesn't support faster communication broadband via P2P"),
        Form(message=r"peer access is not supported between these two devices"),
    )
    cause = "these cards have no peer-to-peer access, and NCCL would hang if it used it"
    confidence = 0.85
    fixes = (
        Fix(text="test: run with NCCL_P2P_DISABLE=1; if that cures it, leave it on"),
        Fix(text="or switch off ACS and IOMMU in the BIOS (iommu=pt), and update the driver"),
    )
    caveat = "A test, not a verdict: a network that lets nothing through looks the same from here."

    def examine(self, case: Case) -> Iterator[Finding]:
        found = list(nodes.cured_by(self, case, "NCCL_P2P_DISABLE", "peer-to-peer transfers fail", self.fixes))
        found = found or list(super().examine(as_of_the_job(case))) or self._refused(case)
        if found:
            yield from found
            return
        proof = (*_all_wait(case), *_stopped_in_collective(case))
        peers = _peer_access(case)
        if proof and peers:
            yield self.finding(
                cause="every rank is there, and none of them gets through the first collective over P2P",
                evidence=(*proof, *peers)[:MAX_EVIDENCE],
                confidence=0.7,
                caveat=self.caveat,
                fixes=self.fixes,
            )

    def _refused(self, case: Case) -> list[Finding]:
        """NCCL's own line that a GPU may not look into another's memory, and the exception that follows it."""
        refused = list(case.logs.of_kind("no-peer-access")) if case.logs is not None else []
        failed = [context.evidence(failure) for failure in context.failures(case) if "NCCL error" in failure.message]
        return [self.told_by_events(case, refused, (*failed,))] if refused and failed else []

    def told_by_events(self, case: Case, events: list[LogEvent], more: tuple[Evidence, ...] = ()) -> Finding:
        found = super().told_by_events(case, events)
        return replace(found, evidence=(*found.evidence[:2], *more)[:MAX_EVIDENCE])


def _all_wait(case: Case) -> tuple[Evidence, ...]:
    """The watchdog's lines, if every rank waits in the same of the first collectives, before any step."""
    late = timeouts(case)
    if case.logs is None or case.logs.steps_seen or not timed_out(case) or silent_ranks(case.logs, late):
        return ()
    calls = {(event.fields["op"], event.fields["seq"]) for event in late}
    first = all(int(event.fields["seq"]) <= FIRST_COLLECTIVES for event in late)
    ranks = {event.rank for event in late}
    return tuple(event.evidence() for event in late[:2]) if len(ranks) > 1 and len(calls) == 1 and first else ()


def _stopped_in_collective(case: Case) -> tuple[Evidence, ...]:
    """Ctrl-C in a collective, before any step."""
    if case.logs is None or case.logs.steps_seen:
        return ()
    stopped = (f for f in context.failures(case) if f.type == "KeyboardInterrupt")
    return tuple(context.evidence(f) for f in stopped if passes_through(f.frames, _IN_COLLECTIVE))[:2]


def _peer_access(case: Case) -> tuple[Evidence, ...]:
    """What says that NCCL uses P2P, or that the cards have none."""
    if case.logs is None:
        return ()
    used = [event.evidence() for event in case.logs.of_kind("nccl-p2p")]
    cards = [
        e.evidence() for e in case.logs.of_kind("gpu-name") if _WITHOUT_PEER_ACCESS.search(e.fields.get("gpu", ""))
    ]
    return (*used[:1], *cards[:1])


DIAGNOSES = (P2pHang(),)
