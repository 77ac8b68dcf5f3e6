"""Whether the ranks can talk once they have met: what the communication check proves, and exceptions of that kind."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from dsdoctor.case import Case
from dsdoctor.comm.facts import CommFacts, CommRank
from dsdoctor.comm.reading import CommReading
from dsdoctor.diagnoses import context, nodes
from dsdoctor.diagnoses.base import Diagnosis
from dsdoctor.diagnoses.comm_check import MAX_SHOWN, SOURCE, ended, names, reading_of, stands
from dsdoctor.diagnoses.environment import NO_DEVICE_TEXT
from dsdoctor.diagnoses.explained import holds
from dsdoctor.diagnoses.forms import Form, TextDiagnosis
from dsdoctor.diagnoses.peers import raised_itself
from dsdoctor.diagnoses.rendezvous import NOT_AT_THE_BARRIER, port_taken
from dsdoctor.diagnoses.shared_memory import SHM_TEXT, SIGBUS
from dsdoctor.finding import Evidence, Finding, Fix
from dsdoctor.runs.facts import Failure

_OF_NCCL = ("comm/ib-error", "comm/wrong-interface", "comm/p2p-hang", "comm/nccl-error")


class StalledRank(TextDiagnosis):
    """A rank came to the rendezvous and then stopped: it hangs outside the collectives, was stopped by a signal, or
    died, while the others wait for it.

    What proves it: in the communication check the others are inside a collective until its deadline (or see the
    connection closed), and this rank's stack is elsewhere, its process is in the stopped state, or it is gone. In a
    log: `monitored_barrier` names the ranks that did not come to it although training had begun.

    When it could be wrong: the network is not the cause, though a stopped process looks like a network fault to all
    others. A machine that is far too busy can make a rank miss the deadline.

    What to do: a stopped process goes on with `kill -CONT PID` (who stopped it: a shell's job control, a debugger, a
    container that was paused). For a dead one the signal says more: 9 is the out-of-memory killer or a user.
    """

    id = "comm/stalled-rank"
    severity = "error"
    title = "a rank arrived and then stopped"
    forms = (NOT_AT_THE_BARRIER,)
    confidence = 0.8
    fixes = (Fix(text="look at the log and the stack (py-spy dump --pid PID) of the rank that did not come"),)

    def applies(self, failure: Failure, case: Case) -> bool:
        """Only after training had begun, and where no rank had a reason to be elsewhere."""
        return case.logs is not None and bool(case.logs.steps_seen) and not raised_itself(case)

    def tell(self, groups: Mapping[str, str]) -> str:
        who = groups["late"] if groups.get("late", "?") != "?" else "a rank"
        return f"{who} had trained and then did not come to the monitored barrier"

    def examine(self, case: Case) -> Iterator[Finding]:
        reading = reading_of(case, "stalled", "stopped", "died")
        if reading is None or case.comm is None or (reading.kind == "died" and _bus_error(reading)):
            yield from super().examine(case)
            return
        first, alone = reading.ranks[0], len(reading.ranks) == case.comm.world_size
        told = {
            "died": f"died{first.where or ' after the rendezvous'}{ended(first)}",
            "stopped": f"was stopped by a signal (process {first.pid} is in state T)",
            "stalled": f"stands still{first.where or ' between two steps'}",
        }[reading.kind]
        yield self.finding(
            cause=f"{names(reading.ranks)} {told}" + ("" if alone else " while the other ranks wait for it"),
            evidence=stands(case.comm, reading),
            confidence=0.9,
            fixes=(_wake(first) if reading.kind == "stopped" else _look(first),),
        )


class Unreachable(TextDiagnosis):
    """Ranks cannot be connected to: they all are there, and nothing arrives.

    What proves it: in the communication check every rank came as far as the same step and waits inside it until the
    deadline, or connecting is refused or times out. In a job: torch's exception on connecting to the master's store
    (that of torchrun's rendezvous, too), gloo's full mesh that fails, or NCCL's "Connect to ... failed".

    When it could be wrong: one direction may work. A collective that hangs inside one machine points to peer-to-peer
    access between GPUs (`NCCL_P2P_DISABLE=1` as a test), not to the network.

    What to do: check address, route and firewall for the port and for the ports that NCCL and gloo choose themselves;
    `NCCL_SOCKET_IFNAME` / `GLOO_SOCKET_IFNAME` name the interface.
    """

    id = "comm/unreachable"
    severity = "error"
    title = "ranks cannot reach each other"
    forms = (
        Form(message=r"client socket has (?:timed out|failed to connect)(?![\s\S]*cannot be retrieved)"),
        Form(message=r"connectFullMesh failed"),
        Form(message=r"[Cc]onnect to \S+ failed : \w"),
        Form(message=r"connect\(\) timed out\. Original timeout"),
        Form(types=("RendezvousConnectionError",), frames=r":_create_tcp_store:"),
    )
    kinds = ("client-timeout",)
    cause = "a rank cannot connect to the others"
    confidence = 0.8
    fixes = (
        Fix(
            text="check address, route and firewall between the nodes; "
            "name the interface by NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME"
        ),
    )

    def examine(self, case: Case) -> Iterator[Finding]:
        yield from nodes.no_connection(self, case)
        yield from nodes.silent_master(self, case)
        reading = reading_of(case, "unreachable", "lost", "not-started")
        if reading is None or case.comm is None or (reading.kind == "not-started" and not _elsewhere(case.comm)):
            if not holds(case, "comm/name-resolution", "comm/wrong-interface"):
                yield from list(super().examine(case)) or self._of_nccl(case)
            return
        if reading.kind == "not-started":
            where = case.comm.resolution.addresses[:2] if case.comm.resolution else ()
            cause = f"MASTER_ADDR {case.comm.master_addr} ({', '.join(where)}) is not this machine, and did not answer"
        elif reading.kind == "lost":
            hosts = ", ".join(dict.fromkeys(rank.host for rank in reading.ranks))
            cause = f"nothing was heard any more of {names(reading.ranks)} on {hosts} after the ranks had met"
        else:
            cause = f"every rank is there, and {names(reading.ranks)} got no answer{reading.ranks[0].where}"
        yield self.finding(cause=cause, evidence=stands(case.comm, reading), confidence=0.75, fixes=self.fixes)

    def _of_nccl(self, case: Case) -> list[Finding]:
        """NCCL's own line about a connection that failed, and an error of NCCL that does not repeat it."""
        refused = list(case.logs.of_kind("connect-failed")) if case.logs is not None else []
        failed = [context.evidence(failure) for failure in context.failures(case) if "NCCL error" in failure.message]
        if not refused or not failed:
            return []
        proof = (refused[0].evidence(), *failed)[:MAX_SHOWN]
        cause = f"connecting to {refused[0].fields['address']} failed"
        return [self.finding(cause=cause, evidence=proof, confidence=self.confidence, fixes=self.fixes)]


class WrongValue(Diagnosis):
    """A collective completed and its result is wrong: data is damaged on its way, silently.

    What proves it: every rank sends values that are exact in the precision, and the result differs from what they must
    give. The evidence says how many elements, on which rank, and whose contribution they are.

    When it could be wrong: it is arithmetic on small integers, so rounding is no explanation. Faulty memory of the
    device looks the same as a faulty link.

    What to do: leave that device (or link) out (`CUDA_VISIBLE_DEVICES`, `NCCL_P2P_DISABLE=1`, `NCCL_IB_HCA`) and repeat
    the check; `nvidia-smi -q -d ECC,ROW_REMAPPER` and `dcgmi diag -r 3` for the device; then replace it.
    """

    id = "comm/wrong-value"
    severity = "error"
    title = "a collective returned a wrong result"

    def examine(self, case: Case) -> Iterator[Finding]:
        reading = reading_of(case, "wrong-value")
        if reading is None or case.comm is None:
            return
        pairs = [(rank, step) for rank in reading.ranks for step in rank.steps if step.status == "wrong-value"]
        step = pairs[0][1]
        what = f"{step.name} ({step.dtype}) gave wrong values on {names(reading.ranks)}"
        yield self.finding(
            cause=f"{what}: {step.text.partition(': ')[2]}",
            evidence=tuple(
                Evidence(source=SOURCE, rank=r.rank, text=f"{s.name} ({s.dtype}) on {r.device}: {s.text}")
                for r, s in pairs
            )[:MAX_SHOWN],
            confidence=0.95,
            fixes=(
                Fix(text="leave that device or link out, repeat the check, and replace it if the others are right"),
            ),
        )


class FailedStep(Diagnosis):
    """A rank of the communication check failed with an exception of its own that no narrower diagnosis explains.

    What proves it: the exception, with the step and the rank where it came first; what other ranks report follows.

    When it could be wrong: the message is all that is known of it.

    What to do: read the message; it comes from torch, NCCL or gloo before any of the job's own code matters.
    `NCCL_DEBUG=INFO` and `TORCH_DISTRIBUTED_DEBUG=DETAIL` add what they tried.
    """

    id = "comm/failed-step"
    severity = "error"
    title = "a rank fails before training begins"

    def examine(self, case: Case) -> Iterator[Finding]:
        reading = reading_of(case, "failed", "not-started")
        if reading is None or case.comm is None or _narrower(case.comm, reading) or holds(case, *_OF_NCCL):
            return
        first = reading.ranks[0]
        text = first.trouble.text if first.trouble else ""
        cause = f"rank {first.rank} failed{first.where}: {text}" if text else "the launcher started no rank"
        yield self.finding(
            cause=cause.partition("\n")[0],
            evidence=stands(case.comm, reading),
            confidence=0.8,
            fixes=(Fix(text="read the message and what the launcher printed; training would stop at the same place"),),
        )


def _elsewhere(facts: CommFacts) -> bool:
    return facts.resolution is not None and not facts.resolution.local


def _narrower(facts: CommFacts, reading: CommReading) -> bool:
    """Another diagnosis tells this failure better."""
    step = reading.step
    text = step.text if step is not None else ""
    if reading.kind == "not-started":
        return _elsewhere(facts) or bool(port_taken(facts))
    return re.search(NO_DEVICE_TEXT, text) is not None or re.search(SHM_TEXT, text) is not None


def _bus_error(reading: CommReading) -> bool:
    return any(rank.exit_code == SIGBUS for rank in reading.ranks)


def _wake(rank: CommRank) -> Fix:
    return Fix(text=f"find out who stopped process {rank.pid} on {rank.host}; `kill -CONT {rank.pid}` lets it go on")


def _look(rank: CommRank) -> Fix:
    return Fix(text=f"look at rank {rank.rank} on {rank.host or 'its node'}: its stack and what it printed")


DIAGNOSES: tuple[Diagnosis, ...] = (StalledRank(), Unreachable(), WrongValue(), FailedStep())
