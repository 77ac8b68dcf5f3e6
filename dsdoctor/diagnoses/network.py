"""Errors of the network between nodes as NCCL and gloo tell them."""

from __future__ import annotations

import re
from collections.abc import Iterator

from dsdoctor.case import Case
from dsdoctor.diagnoses import context, nodes
from dsdoctor.diagnoses.base import Diagnosis
from dsdoctor.diagnoses.comm_check import as_of_the_job
from dsdoctor.diagnoses.explained import explained, has_specific_root
from dsdoctor.diagnoses.forms import MAX_EVIDENCE
from dsdoctor.diagnoses.peers import is_peer_failure
from dsdoctor.diagnoses.processes import KILL, SEGMENTATION_FAULT, endings
from dsdoctor.diagnoses.shared_memory import SIGBUS
from dsdoctor.finding import Evidence, Finding, Fix
from dsdoctor.runs.facts import Failure

IB_TIMEOUT = "12"
VIRTUAL = re.compile(r"\[0\](?:docker|br-|virbr|veth|lo\b|cni|flannel|cali|tun|tap)")
_COMPLETION = re.compile(r"Got completion (?:from peer \S+ )?with (?:status=(?:IBV_\w+\()?|error )(?P<status>\d+)")
_UNANSWERED = re.compile(r"ibv_modify_qp failed|ibv_\w+ failed.*(?:timed out|unreachable)")
_VERBS = re.compile(r"Call to ibv_\w+ failed")
_NCCL_ERROR = re.compile(r"NCCL error(?: in)?: |ncclUnhandledCudaError|ncclSystemError|ncclInternalError")
_LAST_WORDS = re.compile(r"Last error:\s*\n(?P<words>.+)")
_NO_INTERFACE = re.compile(r"no socket interface found|Unable to find address for: (?P<name>\S+)")

_NAME_IT = (Fix(text="set NCCL_SOCKET_IFNAME to the interface that joins the nodes, `lo` for one machine alone"),)
_CHECK_FABRIC = (Fix(text="check link (ibstat, counters), GID index, MTU and firewall between the hosts"),)


class InfinibandError(Diagnosis):
    """An InfiniBand transfer failed.

    What it is: NCCL got a completion with an error from the network card. Status 12 means that the other side did not
    answer after all retries; status 5 only that a request was flushed because the connection had gone already.

    What proves it: "NET/IB : Got completion ... with status=N" (error N in old releases, a name beside the number in
    new ones), or a call of the verbs library that NCCL says failed, such as ibv_create_qp or ibv_reg_mr.

    When it could be wrong: with status 5 alone the first failure is on the peer, and where a process was killed it is
    only a consequence; a peer that died for another reason gives status 12, too: read its log.

    What to do: where a call failed, let the container lock memory (`ulimit -l unlimited`, `--ulimit memlock=-1`) and
    see the devices (`--device /dev/infiniband`). Where a completion failed, check the link (ibstat, counters), GID
    index, MTU and firewall between the two hosts of the message.
    """

    id = "comm/ib-error"
    severity = "error"
    title = "an InfiniBand transfer failed"

    def examine(self, case: Case) -> Iterator[Finding]:
        yield from nodes.cured_by(self, case, "NCCL_IB_DISABLE", "InfiniBand transfers fail", _CHECK_FABRIC)
        case = as_of_the_job(case)
        if case.logs is None or any(not self._says_so(failure) for failure in _of_ranks(case)):
            return
        completions = _completions(case)
        calls = [event.evidence() for event in case.logs.of_kind("ib-verbs")]
        calls += [
            one
            for failure in context.failures(case)
            if _VERBS.search(failure.message) is not None
            for one in (*_decisive(failure), context.evidence(failure))
        ]
        if completions:
            yield self._completion(case, completions)
        elif calls and any(context.failures(case)):
            yield self._call(calls)

    def _says_so(self, failure: Failure) -> bool:
        """True for the exception of such a transfer, and for one of NCCL that gives no reason."""
        said = failure.message
        if _NCCL_ERROR.search(said) is not None and _LAST_WORDS.search(said) is None:
            return True
        return _COMPLETION.search(said) is not None or _VERBS.search(said) is not None

    def _completion(self, case: Case, completions: list[tuple[str, Evidence]]) -> Finding:
        chosen = sorted(completions, key=lambda one: one[0] != IB_TIMEOUT)
        status = chosen[0][0]
        first = status == IB_TIMEOUT
        what = "the peer did not answer after all retries" if first else "a request was flushed, the peer had gone"
        return self.finding(
            cause=f"InfiniBand completion with status {status}: {what}",
            evidence=tuple(evidence for _, evidence in chosen[:MAX_EVIDENCE]),
            confidence=0.9 if first else 0.6,
            role="root" if first or not _killed(case) else "consequence",
            caveat="A peer that died for another reason looks the same; read its log.",
            fixes=(Fix(text="check link, GID index, MTU and firewall between the two hosts that the message names"),),
        )

    def _call(self, calls: list[Evidence]) -> Finding:
        unanswered = [one for one in calls if _UNANSWERED.search(one.text) is not None]
        cause = "the two hosts cannot set up an InfiniBand connection with each other"
        fix = "check the GID index (NCCL_IB_GID_INDEX), the subnet of the ports and the firewall between the two hosts"
        if not unanswered:
            cause = "a call of the InfiniBand library failed, mostly because the process may not lock memory"
            fix = "let the process lock memory: ulimit -l unlimited, or --ulimit memlock=-1 for a container"
        return self.finding(
            cause=cause,
            evidence=(*unanswered, *(one for one in calls if one not in unanswered))[:MAX_EVIDENCE],
            confidence=0.75,
            caveat="NCCL_IB_DISABLE=1 tells whether the job runs without InfiniBand; it is then slow.",
            fixes=(Fix(text=fix),),
        )


class WrongInterface(Diagnosis):
    """NCCL uses a network interface that leads nowhere.

    What it is: without NCCL_SOCKET_IFNAME, NCCL takes the first interface it finds, which may be docker0 or another
    bridge. Its address exists on every host and none can be reached by it.

    What proves it: such an interface comes first in "NET/Socket : Using", and connecting to an address failed; or the
    interface that NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME names does not exist on the machine ("no socket interface
    found", "Unable to find address for").

    When it could be wrong: several nodes on one host really can talk over a bridge; then connecting does not fail.

    What to do: `NCCL_SOCKET_IFNAME` (and `GLOO_SOCKET_IFNAME`) with the interface that joins the nodes, or exclude the
    bridges with `^docker0,br-`.
    """

    id = "comm/wrong-interface"
    severity = "error"
    title = "NCCL uses an interface that leads nowhere"

    def examine(self, case: Case) -> Iterator[Finding]:
        yield from nodes.wrong_interface(self, case)
        yield from nodes.cured_by(
            self, case, "NCCL_SOCKET_IFNAME", "the interface that NCCL takes by itself leads nowhere", _NAME_IT
        )
        case = as_of_the_job(case)
        yield from self._named_in_vain(case)
        if case.logs is None:
            return
        virtual = [e for e in case.logs.of_kind("nccl-interface") if VIRTUAL.match(e.fields.get("interfaces", ""))]
        failed = list(case.logs.of_kind("connect-failed"))
        if not virtual or not failed:
            return
        name = virtual[0].fields["interfaces"].partition(":")[0].partition("]")[2]
        yield self.finding(
            cause=f"NCCL chose {name}, and connecting to {failed[0].fields.get('address')} failed",
            evidence=(failed[0].evidence(), virtual[0].evidence()),
            confidence=0.92,
            fixes=(Fix(text="set NCCL_SOCKET_IFNAME (and GLOO_SOCKET_IFNAME) to the interface that joins the nodes"),),
        )

    def _named_in_vain(self, case: Case) -> Iterator[Finding]:
        """The variable names an interface that this machine does not have."""
        found = [(f, m) for f in context.failures(case) for m in [_NO_INTERFACE.search(f.message)] if m is not None]
        if found:
            name = found[0][1]["name"]
            yield self.finding(
                cause=f"the interface {name} does not exist on this machine"
                if name
                else "the interface that NCCL_SOCKET_IFNAME names does not exist on this machine",
                evidence=(context.evidence(found[0][0]), *_decisive(found[0][0]))[:MAX_EVIDENCE],
                confidence=0.92,
                fixes=(
                    Fix(text="set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to an interface that `ip -br addr` shows"),
                    Fix(text="GLOO_SOCKET_IFNAME takes one plain name: no list and no ^ as NCCL's does"),
                ),
            )


class NcclError(Diagnosis):
    """NCCL failed, and what it says names no narrower reason.

    What it is: an error inside NCCL ("unhandled system error", "unhandled cuda error", "internal error") that torch
    passes on as an exception. It comes from the network, the driver or shared memory, not from the line of the script
    that the traceback shows.

    What proves it: "NCCL error in:" in the exception, with no reason that has a page of its own: a refused connection,
    InfiniBand, shared memory, peer access between GPUs, two ranks on one GPU, no GPU memory left, other versions.

    When it could be wrong: without `NCCL_DEBUG` the reason itself is missing, and one of the pages above may be meant.

    What to do: run it again with `NCCL_DEBUG=INFO` (and `NCCL_DEBUG_FILE=nccl.%h.%p.log`) and read the first `NCCL
    WARN`; `dsdoctor comm --read nccl.*.log` does that. As tests of one switch each: `NCCL_P2P_DISABLE=1`,
    `NCCL_IB_DISABLE=1`, `NCCL_SHM_DISABLE=1`, `NCCL_SOCKET_IFNAME`.
    """

    id = "comm/nccl-error"
    severity = "error"
    title = "NCCL failed, and does not say why"

    def examine(self, case: Case) -> Iterator[Finding]:
        case = as_of_the_job(case)
        first = next(iter(_of_ranks(case)), None)
        if first is None or _NCCL_ERROR.search(first.message) is None:
            return
        if explained(first, case) or has_specific_root(case):
            return
        last = _LAST_WORDS.search(first.message)
        said = last["words"].strip() if last is not None else first.message.partition("\n")[0].partition(": ")[2]
        same = [context.evidence(one) for one in _of_ranks(case)[1:] if _NCCL_ERROR.search(one.message) is not None]
        yield self.finding(
            cause=f"NCCL failed: {said}",
            evidence=(context.evidence(first), *same)[:MAX_EVIDENCE],
            confidence=0.6,
            caveat="The reason stands in NCCL's own warnings, which this log does not have.",
            fixes=(
                Fix(text="run it with NCCL_DEBUG=INFO and read the first NCCL WARN; the script is not at fault"),
                Fix(text="test one switch at a time: NCCL_P2P_DISABLE=1, NCCL_IB_DISABLE=1, NCCL_SHM_DISABLE=1"),
            ),
        )


def _killed(case: Case) -> bool:
    """True if a process was killed, or crashed: its peers' requests are then flushed."""
    dead = (KILL, SEGMENTATION_FAULT, SIGBUS)
    return any(ending.code in dead and not ending.by_launcher for ending in endings(case))


def _of_ranks(case: Case) -> list[Failure]:
    """The exceptions that are no answer to the loss of another rank."""
    return [failure for failure in context.failures(case) if not is_peer_failure(failure)]


def _completions(case: Case) -> list[tuple[str, Evidence]]:
    """Status and line of every completion with an error, from NCCL's own lines or from an exception's last words."""
    told = [(e.fields["status"], e.evidence()) for e in case.logs.of_kind("ib-completion")] if case.logs else []
    raised = [
        (m["status"], f) for f in context.failures(case) for m in [_COMPLETION.search(f.message)] if m is not None
    ]
    return told or [(status, (*_decisive(f), context.evidence(f))[0]) for status, f in raised]


def _decisive(failure: Failure) -> tuple[Evidence, ...]:
    """The line of the message that says it, where the log has its number."""
    for text, line in zip(failure.message.splitlines(), failure.message_lines, strict=False):
        if any(words.search(text) is not None for words in (_COMPLETION, _VERBS, _NO_INTERFACE)):
            return (Evidence(source=failure.source, line=line, rank=failure.rank, text=text.strip()),)
    return ()


DIAGNOSES: tuple[Diagnosis, ...] = (InfinibandError(), WrongInterface(), NcclError())
