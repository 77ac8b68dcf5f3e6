"""Whether the ranks of a job can meet: the port, the name of the master, and who did not come."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from dsdoctor.case import Case
from dsdoctor.comm.facts import CommFacts
from dsdoctor.diagnoses import context, nodes
from dsdoctor.diagnoses.base import Diagnosis
from dsdoctor.diagnoses.comm_check import SOURCE, ended, names, reading_of, stands
from dsdoctor.diagnoses.explained import holds
from dsdoctor.diagnoses.forms import MAX_EVIDENCE, Form, TextDiagnosis
from dsdoctor.diagnoses.peers import raised_itself
from dsdoctor.finding import Evidence, Finding, Fix
from dsdoctor.runs.facts import Failure

_TRIED_NAME = re.compile(r"trying to connect to \((?P<name>[^,()]*[A-Za-z][^,()]*), \d+\)")

WAITED_IN_VAIN = Form(
    message=r"(?i)timed out after \d+ \w+ waiting for (?:clients|workers)[.\s]+(?P<here>\d+)/(?P<all>\d+) \w+ joined"
)
"""What the store of rank 0 says when ranks did not come."""
NOT_AT_THE_BARRIER = Form(
    message=r"(?P<late>[Rr]anks? [\d, ]+) failed to pass monitoredBarrier|timed out in monitoredBarrier"
)
"""What the rank of a monitored barrier says of those that did not come to it."""
_KEY_OF_A_RANK = Form(message=r"^wait timeout after \d+ms, keys|^Socket Timeout$")
"""What a rank raises that waits in vain for what another one was to write into the store."""

_REFUSED = r"errno: 13\b|code: -13\b|EACCES"
"""How torch says that the user may not listen on a port; the later forms are those of its store on libuv."""


class PortInUse(TextDiagnosis):
    """The port where the ranks are to meet is taken by another process, so that rank 0 cannot listen on it.

    What proves it: listening on the port fails with EADDRINUSE (errno 98) before any rank is started, or an exception
    of the job says so. A port is tested only if it was chosen by the user or the script (`MASTER_PORT`). EACCES
    (errno 13) means that the user may not listen there at all, which is said instead: on Linux only root may use the
    ports below 1024.

    When it could be wrong: several start-up banners of a launcher in one log mean that the job was started twice (srun
    in front of a launcher that starts all ranks itself); then the job stands in its own way. A process of an earlier
    run of the same job that did not end is the usual holder.

    What to do: end the process that holds the port, or choose another `MASTER_PORT` (`--master_port`).
    """

    id = "launch/port-in-use"
    severity = "error"
    title = "rank 0 cannot listen on the rendezvous port"
    forms = (
        Form(message=rf"(?P<refused>server socket has failed to [^\n]*(?:{_REFUSED}))"),
        Form(message=r"EADDRINUSE|[Aa]ddress already in use|\berrno:? ?98\b|server socket has failed to listen"),
    )
    kinds = ("port-taken",)
    cause = "the rendezvous port is already in use by another process"
    fixes = (
        Fix(text="end the process that holds the port (often a left-over of an earlier run): `ss -ltnp`"),
        Fix(text="or choose another port: MASTER_PORT or --master_port"),
    )

    def tell(self, groups: Mapping[str, str]) -> str:
        return _MAY_NOT if _refused(groups) else self.cause

    def remedies(self, groups: Mapping[str, str]) -> tuple[Fix, ...]:
        return (_HIGHER_PORT,) if _refused(groups) else self.fixes

    def examine(self, case: Case) -> Iterator[Finding]:
        taken = port_taken(case.comm)
        if not taken:
            yield from nodes.stranger_at_port(self, case)
            yield from (self._launched_twice(found, case) for found in super().examine(case))
            return
        port = case.comm.master_port if case.comm else None
        yield self.finding(
            cause=f"MASTER_PORT {port} is already in use by another process",
            evidence=(Evidence(source=SOURCE, text=taken),),
            confidence=0.97,
            fixes=self.fixes,
        )

    def _launched_twice(self, found: Finding, case: Case) -> Finding:
        """Several launchers for the first node in one log: each wants the port for itself."""
        first = [e for e in case.logs.of_kind("node-rank") if e.fields["node"] == "0"] if case.logs is not None else []
        if sum(event.count for event in first) < 2:
            return found
        return replace(
            found,
            cause="the job was launched more than once, and each launcher wants the rendezvous port for itself",
            evidence=(*found.evidence[:2], *(event.evidence() for event in first))[:MAX_EVIDENCE],
            fixes=(Fix(text="start one launcher a node: srun --ntasks-per-node=1 deepspeed ..."), *self.fixes),
        )


_MAY_NOT = "the user has no permission to listen on the rendezvous port (errno 13): ports below 1024 are root's"
_HIGHER_PORT = Fix(text="choose a port above 1023: MASTER_PORT or --master_port, for instance 29500")


def _refused(groups: Mapping[str, str]) -> bool:
    """True if listening on the port was not allowed, rather than the port taken."""
    return groups.get("refused", "?") != "?"


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
        if case.logs is None:
            return
        names = {event.fields["name"]: event for event in case.logs.of_kind("name-unresolved")}
        tried = [
            (match["name"], context.evidence(failure))
            for failure in context.failures(case)
            if (match := _TRIED_NAME.search(failure.message)) is not None
        ]
        tried += [(event.fields["name"], event.evidence()) for event in case.logs.of_kind("client-timeout")]
        for name, proof in tried:
            if name in names:
                yield self.finding(
                    cause=self.tell({"name": name}),
                    evidence=(names[name].evidence(), proof),
                    confidence=0.8,
                    caveat="The warning alone is no fault: where only IPv4 is in use torch prints it and goes on.",
                    fixes=self.fixes,
                )
                return


class MissingRank(TextDiagnosis):
    """A rank never came to the rendezvous, so that the others wait for it there.

    What proves it: the communication check starts every rank; the others stand at the rendezvous until the deadline,
    and this one has written nothing, or has ended or stands still before it. In a log: the store that counts how many
    of the ranks joined, or torchrun's rendezvous that timed out.

    When it could be wrong: a very slow import of torch (a cold network disk) looks the same until it is over.

    What to do: read what that rank printed. A process that ended at once usually lacks a library; one that never began
    was not started by the launcher. See that each node was given the same `--nnodes`, `--master_addr` and
    `--master_port`, and a `--node_rank` of its own; `dsdoctor comm` under the same launcher names who is missing.
    """

    id = "comm/missing-rank"
    severity = "error"
    title = "a rank never arrived at the rendezvous"
    forms = (
        WAITED_IN_VAIN,
        Form(
            message=r"store based barrier .*world_size=(?P<all>\d+), (?:worker_count|num_workers_joined)=(?P<here>\d+)"
        ),
        Form(types=("RendezvousTimeoutError",)),
        NOT_AT_THE_BARRIER,
        _KEY_OF_A_RANK,
    )
    confidence = 0.8
    fixes = (
        Fix(text="see that every node was started, with the same number of nodes and the same address and port"),
        Fix(text="read what the ranks printed that did not come"),
    )

    def applies(self, failure: Failure, case: Case) -> bool:
        """A rank that had trained before has arrived; and who raised an exception had a reason not to come."""
        if NOT_AT_THE_BARRIER.match(failure) is None and _KEY_OF_A_RANK.match(failure) is None:
            return True
        return (case.logs is None or not case.logs.steps_seen) and not raised_itself(case)

    def tell(self, groups: Mapping[str, str]) -> str:
        if groups.get("late", "?") != "?":
            return f"{groups['late']} never came to the monitored barrier"
        if groups.get("all", "?") == "?":
            return "a rank or a node never came to the rendezvous, and the others waited for it until their time was up"
        return f"only {groups['here']} of {groups['all']} ranks came to the rendezvous"

    def examine(self, case: Case) -> Iterator[Finding]:
        yield from nodes.absent_master(self, case)
        reading = reading_of(case, "missing")
        if reading is None or case.comm is None:
            if not holds(case, "launch/world-size-mismatch"):
                yield from super().examine(case)
            return
        first = reading.ranks[0]
        how = {"never-started": "was never started", "died": f"ended before{ended(first)}"}
        what = how.get(first.ending, "stands still before")
        yield self.finding(
            cause=f"{names(reading.ranks)} never came to the rendezvous: it {what}",
            evidence=stands(case.comm, reading),
            confidence=0.9,
            fixes=(
                Fix(
                    text=f"read what rank {first.rank} printed and where its stack stands; the other ranks are waiting"
                ),
            ),
        )


def port_taken(facts: CommFacts | None) -> str:
    """The proof that the port is taken: from the test before the start, or from the launcher that could not start."""
    if facts is None:
        return ""
    if facts.port_taken or not facts.ranks or any(rank.ending != "never-started" for rank in facts.ranks):
        return facts.port_taken
    return next((line.strip() for line in facts.output.splitlines() if "EADDRINUSE" in line or "errno: 98" in line), "")


DIAGNOSES: tuple[Diagnosis, ...] = (PortInUse(), NameResolution(), MissingRank())
