"""Whether the ranks can meet and talk: what the communication check proves, and the exceptions of the same kind."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from dsdoctor.case import Case
from dsdoctor.comm.facts import CommFacts, CommRank
from dsdoctor.comm.reading import CommReading, read
from dsdoctor.diagnoses import context, nodes
from dsdoctor.diagnoses.base import Diagnosis
from dsdoctor.diagnoses.environment import NO_DEVICE_TEXT
from dsdoctor.diagnoses.explained import holds
from dsdoctor.diagnoses.forms import Form, TextDiagnosis
from dsdoctor.diagnoses.peers import raised_itself
from dsdoctor.diagnoses.shared_memory import SHM_TEXT, SIGBUS
from dsdoctor.finding import Evidence, Finding, Fix
from dsdoctor.runs.facts import Failure

SOURCE = "comm"
_STACK_LINES = 6
_MAX_EVIDENCE = 6


class PortInUse(TextDiagnosis):
    """The port where the ranks are to meet is taken by another process, so that rank 0 cannot listen on it.

    What proves it: listening on the port fails with EADDRINUSE (errno 98) before any rank is started, or an exception
    of the job says so. A port is tested only if it was chosen by the user or the script (`MASTER_PORT`).

    When it could be wrong: several start-up banners of a launcher in one log mean that the job was started twice (srun
    in front of a launcher that starts all ranks itself); then the job stands in its own way. A process of an earlier
    run of the same job that did not end is the usual holder.

    What to do: end the process that holds the port, or choose another `MASTER_PORT` (`--master_port`).
    """

    id = "launch/port-in-use"
    severity = "error"
    title = "the rendezvous port is in use"
    forms = (Form(message=r"EADDRINUSE|[Aa]ddress already in use|\berrno:? ?98\b|server socket has failed to listen"),)
    kinds = ("port-taken",)
    cause = "the rendezvous port is already in use by another process"
    fixes = (
        Fix(text="end the process that holds the port (often a left-over of an earlier run): `ss -ltnp`"),
        Fix(text="or choose another port: MASTER_PORT or --master_port"),
    )

    def examine(self, case: Case) -> Iterator[Finding]:
        taken = _port_taken(case.comm)
        if not taken:
            yield from nodes.stranger_at_port(self, case)
            yield from super().examine(case)
            return
        port = case.comm.master_port if case.comm else None
        yield self.finding(
            cause=f"MASTER_PORT {port} is already in use by another process",
            evidence=(Evidence(source=SOURCE, text=taken),),
            confidence=0.97,
            fixes=self.fixes,
        )


class NameResolution(TextDiagnosis):
    """The name of the master (`MASTER_ADDR`) does not resolve to an address, so that no rank finds rank 0.

    What proves it: the resolver of this machine refuses the name, or torch's exception on connecting says so.

    When it could be wrong: a resolver that is overloaded refuses names for a moment ("Temporary failure"); and the name
    may resolve on other nodes only.

    What to do: write the address in place of the name, or add the name to the hosts file of every node. A name that
    resolves to 127.0.1.1 on its own node (a Debian default) makes rank 0 listen where no other node can reach it.
    """

    id = "comm/name-resolution"
    severity = "error"
    title = "the master's name does not resolve"
    forms = (
        Form(message=r"addresses of \((?P<name>[^,()]+), \d+\) cannot be retrieved"),
        Form(message=r"connect \[?(?P<loopback>127\.0\.1\.1)\]?:\d+: Connection refused"),
    )
    fixes = (Fix(text="set MASTER_ADDR to the address of the node of rank 0, or add its name to the hosts file"),)

    def tell(self, groups: Mapping[str, str]) -> str:
        if groups.get("loopback", "?") != "?":
            return f"a node resolves its own name to {groups['loopback']}, where no other node can reach it"
        return f"the master's name {groups.get('name', '?')!r} does not resolve to an address"

    def examine(self, case: Case) -> Iterator[Finding]:
        found = case.comm.resolution if case.comm else None
        if found is None or not found.error:
            yield from nodes.loopback_name(self, case)
            yield from super().examine(case)
            yield from self._in_logs(case)
            return
        yield self.finding(
            cause=self.tell({"name": found.name}),
            evidence=(Evidence(source=SOURCE, text=f"looking up {found.name!r}: {found.error}"),),
            confidence=0.9,
            fixes=self.fixes,
        )

    def _in_logs(self, case: Case) -> Iterator[Finding]:
        """A rank that gave up connecting to a name that torch's warnings say it could not look up."""
        names = {event.fields["name"]: event for event in case.logs.of_kind("name-unresolved")} if case.logs else {}
        for failure in context.failures(case):
            tried = _TRIED_NAME.search(failure.message)
            if tried is not None and tried["name"] in names:
                yield self.finding(
                    cause=self.tell({"name": tried["name"]}),
                    evidence=(names[tried["name"]].evidence(), context.evidence(failure)),
                    confidence=0.8,
                    caveat="The warning alone is no fault: where only IPv4 is in use torch prints it and goes on.",
                    fixes=self.fixes,
                )
                return


_TRIED_NAME = re.compile(r"trying to connect to \((?P<name>[^,()]*[A-Za-z][^,()]*), \d+\)")
WAITED_IN_VAIN = Form(
    message=r"(?i)timed out after \d+ \w+ waiting for (?:clients|workers)[.\s]+(?P<here>\d+)/(?P<all>\d+) \w+ joined"
)
"""What the store of rank 0 says when ranks did not come."""
NOT_AT_THE_BARRIER = Form(
    message=r"(?P<late>[Rr]anks? [\d, ]+) failed to pass monitoredBarrier|timed out in monitoredBarrier"
)
"""What the rank of a monitored barrier says of those that did not come to it."""


class MissingRank(TextDiagnosis):
    """A rank never came to the rendezvous, so that the others wait for it there.

    What proves it: the communication check starts every rank; the others stand at the rendezvous until the deadline,
    and this one has written nothing, or has ended or stands still before it. In a log: the store that counts how many
    of the ranks joined, or torchrun's rendezvous that timed out.

    When it could be wrong: a very slow import of torch (a cold network disk) looks the same until it is over.

    What to do: read what that rank printed. A process that ended at once usually lacks a library; one that never began
    was not started by the launcher.
    """

    id = "comm/missing-rank"
    severity = "error"
    title = "a rank never arrived at the rendezvous"
    forms = (WAITED_IN_VAIN, Form(types=("RendezvousTimeoutError",)), NOT_AT_THE_BARRIER)
    confidence = 0.8
    fixes = (
        Fix(text="see that every node was started, with the same number of nodes and the same address and port"),
        Fix(text="read what the ranks printed that did not come"),
    )

    def applies(self, failure: Failure, case: Case) -> bool:
        """A rank that had trained before has arrived; and who raised an exception had a reason not to come."""
        if NOT_AT_THE_BARRIER.match(failure) is None:
            return True
        return (case.logs is None or not case.logs.steps_seen) and not raised_itself(case)

    def tell(self, groups: Mapping[str, str]) -> str:
        if groups.get("late", "?") != "?":
            return f"{groups['late']} never came to the monitored barrier"
        if groups.get("all", "?") == "?":
            return "nodes never came to the rendezvous of torchrun"
        return f"only {groups['here']} of {groups['all']} ranks came to the rendezvous"

    def examine(self, case: Case) -> Iterator[Finding]:
        yield from nodes.absent_master(self, case)
        reading = reading_of(case, "missing")
        if reading is None or case.comm is None:
            if not holds(case, "launch/world-size-mismatch"):
                yield from super().examine(case)
            return
        first = reading.ranks[0]
        how = {"never-started": "was never started", "died": f"ended before{_exit(first)}"}
        what = how.get(first.ending, "stands still before")
        yield self.finding(
            cause=f"{_names(reading.ranks)} never came to the rendezvous: it {what}",
            evidence=_evidence(case.comm, reading),
            confidence=0.9,
            fixes=(
                Fix(
                    text=f"read what rank {first.rank} printed and where its stack stands; the other ranks are waiting"
                ),
            ),
        )


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
            "died": f"died{first.where or ' after the rendezvous'}{_exit(first)}",
            "stopped": f"was stopped by a signal (process {first.pid} is in state T)",
            "stalled": f"stands still{first.where or ' between two steps'}",
        }[reading.kind]
        yield self.finding(
            cause=f"{_names(reading.ranks)} {told}" + ("" if alone else " while the other ranks wait for it"),
            evidence=_evidence(case.comm, reading),
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
        Form(message=r"[Cc]onnect to \S+ failed : (?:Connection|No route|Software caused|Network is)"),
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
                yield from super().examine(case)
            return
        if reading.kind == "not-started":
            where = case.comm.resolution.addresses[:2] if case.comm.resolution else ()
            cause = f"MASTER_ADDR {case.comm.master_addr} ({', '.join(where)}) is not this machine, and did not answer"
        elif reading.kind == "lost":
            hosts = ", ".join(dict.fromkeys(rank.host for rank in reading.ranks))
            cause = f"nothing was heard any more of {_names(reading.ranks)} on {hosts} after the ranks had met"
        else:
            cause = f"every rank is there, and {_names(reading.ranks)} got no answer{reading.ranks[0].where}"
        yield self.finding(cause=cause, evidence=_evidence(case.comm, reading), confidence=0.75, fixes=self.fixes)


class WrongValue(Diagnosis):
    """A collective completed and its result is wrong: data is damaged on its way, silently.

    What proves it: every rank sends values that are exact in the precision, and the result differs from what they must
    give. The evidence says how many elements, on which rank, and whose contribution they are.

    When it could be wrong: it is arithmetic on small integers, so rounding is no explanation. Faulty memory of the
    device looks the same as a faulty link.

    What to do: leave that device (or link) out and repeat the check; then replace it.
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
        what = f"{step.name} ({step.dtype}) gave wrong values on {_names(reading.ranks)}"
        yield self.finding(
            cause=f"{what}: {step.text.partition(': ')[2]}",
            evidence=tuple(
                Evidence(source=SOURCE, rank=r.rank, text=f"{s.name} ({s.dtype}) on {r.device}: {s.text}")
                for r, s in pairs
            )[:_MAX_EVIDENCE],
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
    """

    id = "comm/failed-step"
    severity = "error"
    title = "a rank fails before training begins"

    def examine(self, case: Case) -> Iterator[Finding]:
        reading = reading_of(case, "failed", "not-started")
        if reading is None or case.comm is None or _narrower(case.comm, reading):
            return
        first = reading.ranks[0]
        text = first.trouble.text if first.trouble else ""
        cause = f"rank {first.rank} failed{first.where}: {text}" if text else "the launcher started no rank"
        yield self.finding(
            cause=cause.partition("\n")[0],
            evidence=_evidence(case.comm, reading),
            confidence=0.8,
            fixes=(Fix(text="read the message and what the launcher printed; training would stop at the same place"),),
        )


def reading_of(case: Case, *kinds: str) -> CommReading | None:
    """What the check means, if it is one of these kinds."""
    if case.comm is None or not case.comm.ranks:
        return None
    reading = read(case.comm)
    return reading if reading.kind in kinds else None


def _port_taken(facts: CommFacts | None) -> str:
    """The proof that the port is taken: from the test before the start, or from the launcher that could not start."""
    if facts is None:
        return ""
    if facts.port_taken or not facts.ranks or any(rank.ending != "never-started" for rank in facts.ranks):
        return facts.port_taken
    return next((line.strip() for line in facts.output.splitlines() if "EADDRINUSE" in line or "errno: 98" in line), "")


def _elsewhere(facts: CommFacts) -> bool:
    return facts.resolution is not None and not facts.resolution.local


def _narrower(facts: CommFacts, reading: CommReading) -> bool:
    """Another diagnosis tells this failure better."""
    step = reading.step
    text = step.text if step is not None else ""
    if reading.kind == "not-started":
        return _elsewhere(facts) or bool(_port_taken(facts))
    return re.search(NO_DEVICE_TEXT, text) is not None or re.search(SHM_TEXT, text) is not None


def _bus_error(reading: CommReading) -> bool:
    return any(rank.exit_code == SIGBUS for rank in reading.ranks)


def _evidence(facts: CommFacts, reading: CommReading) -> tuple[Evidence, ...]:
    """Where the guilty ranks stand, then one of those that wait, then what was printed if nobody says anything."""
    guilty = {rank.rank for rank in reading.ranks}
    others = [rank for rank in facts.ranks if rank.rank not in guilty and not rank.healthy]
    told = [_stand(rank) for rank in (*reading.ranks[:3], *others[:2])]
    if not any(rank.steps for rank in reading.ranks) and facts.output.strip():
        told.append(Evidence(source="launcher output", text="\n".join(facts.output.splitlines()[-8:])))
    return tuple(told[:_MAX_EVIDENCE])


def _stand(rank: CommRank) -> Evidence:
    step = rank.trouble
    where = f"{rank.ending}{rank.where}" + (f" after {step.seconds:.1f} s" if step is not None and step.seconds else "")
    detail = step.text or "\n".join(step.stack.rstrip().splitlines()[-_STACK_LINES:]) if step is not None else ""
    return Evidence(source=SOURCE, rank=rank.rank, text=f"{where}: {detail}" if detail else f"{where}{_exit(rank)}")


def _names(ranks: tuple[CommRank, ...]) -> str:
    numbers = [str(rank.rank) for rank in ranks[:8]]
    more = ", …" if len(ranks) > len(numbers) else ""
    return f"rank {numbers[0]}" if len(ranks) == 1 else f"ranks {', '.join(numbers)}{more}"


def _exit(rank: CommRank) -> str:
    if rank.exit_code is None:
        return ""
    return f" (signal {-rank.exit_code})" if rank.exit_code < 0 else f" (exit code {rank.exit_code})"


def _wake(rank: CommRank) -> Fix:
    return Fix(text=f"find out who stopped process {rank.pid} on {rank.host}; `kill -CONT {rank.pid}` lets it go on")


def _look(rank: CommRank) -> Fix:
    return Fix(text=f"look at rank {rank.rank} on {rank.host or 'its node'}: its stack and what it printed")


DIAGNOSES: tuple[Diagnosis, ...] = (
    PortInUse(),
    NameResolution(),
    MissingRank(),
    StalledRank(),
    Unreachable(),
    WrongValue(),
    FailedStep(),
)
