"""What a communication check on several nodes proves, most of it before any rank moves. Pure.

Every function takes the diagnosis on whose behalf it looks and yields at most one finding.
"""

from __future__ import annotations

from collections.abc import Iterator

from dsdoctor.case import Case
from dsdoctor.comm import members
from dsdoctor.comm.facts import CommFacts
from dsdoctor.comm.links import Link
from dsdoctor.comm.meeting import NO_STORE
from dsdoctor.comm.members import Member
from dsdoctor.comm.reading import called, read
from dsdoctor.diagnoses.base import Diagnosis
from dsdoctor.finding import Evidence, Finding, Fix

SOURCE = "comm"
_MAX_EVIDENCE = 6


def loopback_name(diagnosis: Diagnosis, case: Case) -> Iterator[Finding]:
    """A node that is not the master's takes the master's name for its own loopback, or a node listens there.

    Ranks numbered as on several nodes may be on one machine all the same; there the loopback is right.
    """
    facts = case.comm
    if facts is None or facts.passed:
        return
    lost = [member for member in facts.members if member.rank > member.local_rank and _loopback(member.master)]
    if lost:
        where = ", ".join(members.hosts(lost))
        named = facts.master_addr not in (*lost[0].master, "localhost")
        what = f"{facts.master_addr} resolves to" if named else "MASTER_ADDR is"
        fix = f"give {facts.master_addr} its real address in the hosts file of {where}"
        yield diagnosis.finding(
            cause=f"{what} {lost[0].master[0]} on {where}, which is not the node of rank 0",
            evidence=tuple(_resolved(facts, member) for member in lost)[:_MAX_EVIDENCE],
            confidence=0.97,
            title="the master's name does not lead to rank 0" if named else "MASTER_ADDR is the loopback",
            fixes=(Fix(text=fix if named else "set MASTER_ADDR to the host of rank 0, the same on all ranks"),),
        )
        return
    for link in facts.broken_links:
        target = _member(facts, link.target)
        if target is not None and target.interface.kind == "loopback" and not target.interface.forced_by:
            yield diagnosis.finding(
                cause=f"{target.host} resolves its own name to {link.address}, so its ranks listen on the loopback",
                evidence=(_broken(facts, link),),
                confidence=0.95,
                fixes=(
                    Fix(text=f"give {target.host} its real address in its own hosts file"),
                    Fix(text=f"or set GLOO_SOCKET_IFNAME={target.route.name or 'the interface that joins the nodes'}"),
                ),
            )
            return


def wrong_interface(diagnosis: Diagnosis, case: Case) -> Iterator[Finding]:
    """A node listens on an interface that the others cannot reach, and has another one that leads to them."""
    facts = case.comm
    broken = facts.broken_links if facts is not None else ()
    for link in broken:
        target = _member(facts, link.target) if facts is not None else None
        if facts is None or target is None or not _suspect(target):
            continue
        chosen, better = target.interface, target.route.name
        why = f" ({chosen.forced_by})" if chosen.forced_by else ""
        variable = chosen.forced_by.partition("=")[0] or "NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME"
        yield diagnosis.finding(
            cause=f"the ranks of {target.host} use {chosen.name}{why}, where no other node reaches them",
            evidence=tuple(_broken(facts, one) for one in broken if one.target == link.target)[:_MAX_EVIDENCE],
            confidence=0.95,
            title="the ranks use an interface that leads nowhere",
            fixes=(Fix(text=f"set {variable} to {better or 'the interface that joins the nodes'} on {target.host}"),),
        )
        return


def no_connection(diagnosis: Diagnosis, case: Case) -> Iterator[Finding]:
    """Nodes that cannot connect to each other though they use the right interface: a filter, a route."""
    facts = case.comm
    if facts is None:
        return
    plain = [link for link in facts.broken_links if (m := _member(facts, link.target)) is None or not _suspect(m)]
    if not plain:
        return
    link = plain[0]
    back = any(one.source == link.target and one.target == link.source for one in facts.broken_links)
    other_way = "nor the other way" if back else "while the other way works"
    yield diagnosis.finding(
        cause=f"{_host(facts, link.source)} cannot connect to {_host(facts, link.target)} at {link.address}: "
        f"{link.error}, {other_way}",
        evidence=tuple(_broken(facts, one) for one in plain)[:_MAX_EVIDENCE],
        confidence=0.95,
        fixes=(
            Fix(text=f"open the firewall of {_host(facts, link.target)} for TCP from the other nodes, on all ports"),
            Fix(text="NCCL and gloo listen on ports that the system chooses: the master's port alone is not enough"),
        ),
    )


def silent_master(diagnosis: Diagnosis, case: Case) -> Iterator[Finding]:
    """The master's port cannot be reached from here: no answer, or no way."""
    facts = case.comm
    if facts is None or not _cut_off(facts) or _refused(facts) or NO_STORE in facts.cannot_meet:
        return
    yield diagnosis.finding(
        cause=f"{_here(facts)} cannot reach rank 0: {facts.cannot_meet}",
        evidence=(Evidence(source=SOURCE, rank=facts.seen_by, text=facts.cannot_meet),),
        confidence=0.85,
        caveat="This node knows only its own side; what rank 0 says is on its own output.",
        fixes=(
            Fix(text=f"check address, route and firewall for {facts.master_addr}:{facts.master_port} from this node"),
        ),
    )


def absent_master(diagnosis: Diagnosis, case: Case) -> Iterator[Finding]:
    """The master's machine answers, and nobody listens on the port: rank 0 was not started, or is elsewhere."""
    facts = case.comm
    if facts is None or not _cut_off(facts) or not _refused(facts):
        return
    yield diagnosis.finding(
        cause=f"nobody listens at {facts.master_addr}:{facts.master_port}: rank 0 was not started there, or has ended",
        evidence=(Evidence(source=SOURCE, rank=facts.seen_by, text=facts.cannot_meet),),
        confidence=0.85,
        caveat="This node knows only its own side.",
        fixes=(Fix(text="see that the node of rank 0 was started, with this MASTER_ADDR and MASTER_PORT"),),
    )


def stranger_at_port(diagnosis: Diagnosis, case: Case) -> Iterator[Finding]:
    """Someone listens on the master's port and is not the store of this job."""
    facts = case.comm
    if facts is None or not _cut_off(facts) or NO_STORE not in facts.cannot_meet:
        return
    yield diagnosis.finding(
        cause=f"another program seems to listen at {facts.master_addr}:{facts.master_port}, where rank 0 should",
        evidence=(Evidence(source=SOURCE, rank=facts.seen_by, text=facts.cannot_meet),),
        confidence=0.6,
        caveat="A rank 0 that was stopped by a signal takes connections and does not answer, too.",
        fixes=(Fix(text="see on the node of rank 0 who listens there (`ss -ltnp`), or choose another MASTER_PORT"),),
    )


def world_sizes(diagnosis: Diagnosis, case: Case) -> Iterator[Finding]:
    """Ranks that were told different world sizes, or two that were told one rank."""
    everyone = case.comm.members if case.comm is not None else ()
    odd, twice = members.world_sizes(everyone), members.twice(everyone)
    if odd is not None:
        named = [member for member in everyone if member.rank in odd.ranks]
        where = ", ".join(members.hosts(named))
        yield diagnosis.finding(
            cause=f"{_ranks(odd.ranks)} on {where} were started for {odd.values[0]} ranks, the others for {odd.usual}",
            evidence=tuple(_world(member) for member in everyone)[:_MAX_EVIDENCE],
            confidence=0.97,
            fixes=(Fix(text=f"start {where} with the same number of nodes and processes as the others"),),
        )
    elif twice:
        yield diagnosis.finding(
            cause=f"rank {twice[0].rank} was started twice, on {' and '.join(m.host for m in twice[:2])}",
            evidence=tuple(_world(member) for member in twice)[:_MAX_EVIDENCE],
            confidence=0.97,
            fixes=(Fix(text="give every node a number of its own (--node_rank), and start the job once"),),
        )


def too_few_devices(diagnosis: Diagnosis, case: Case) -> Iterator[Finding]:
    """A node was given more ranks than torch sees GPUs there, in a job that uses GPUs."""
    everyone = case.comm.members if case.comm is not None and not case.comm.passed else ()
    if not any(member.devices for member in everyone):
        return
    without = [member for member in everyone if member.devices is not None and member.local_rank >= member.devices]
    if not without:
        return
    first = without[0]
    ranks = [member.rank for member in everyone if member.host == first.host]
    yield diagnosis.finding(
        cause=f"{first.host} was given {len(ranks)} ranks, and torch sees {first.devices} GPUs there",
        evidence=tuple(
            Evidence(
                source=SOURCE,
                rank=member.rank,
                text=f"local rank {member.local_rank} on {member.host}, which has {member.devices} GPUs",
            )
            for member in without
        )[:_MAX_EVIDENCE],
        confidence=0.95,
        fixes=(
            Fix(text=f"start at most {first.devices} ranks on {first.host} (slots, --nproc-per-node)"),
            Fix(text="or see why GPUs are hidden there: nvidia-smi, CUDA_VISIBLE_DEVICES, the container's --gpus"),
        ),
    )


def versions(diagnosis: Diagnosis, case: Case) -> Iterator[Finding]:
    """Ranks whose versions or ds_config are not those of the others."""
    everyone = case.comm.members if case.comm is not None else ()
    odd = members.odd_ones_out(everyone)
    if not odd:
        return
    first = odd[0]
    where = ", ".join(members.hosts([member for member in everyone if member.rank in first.ranks]))
    config_only = all(one.what == "ds_config" for one in odd)
    yield diagnosis.finding(
        cause=f"{first.what} is {first.values[0]} on {where} ({_ranks(first.ranks)}) and {first.usual} elsewhere",
        evidence=tuple(
            Evidence(source=SOURCE, rank=rank, text=f"{one.what}: {value} instead of {one.usual}")
            for one in odd
            for rank, value in zip(one.ranks, one.values, strict=True)
        )[:_MAX_EVIDENCE],
        confidence=0.9,
        title="the nodes have different ds_configs" if config_only else "the nodes run different versions",
        fixes=(
            Fix(text=f"copy the same ds_config to {where}")
            if config_only
            else Fix(text=f"run the same image or environment on {where} as on the other nodes"),
        ),
    )


def different_calls(diagnosis: Diagnosis, case: Case) -> Iterator[Finding]:
    """Two ranks of the check stand in different collectives at the same step."""
    reading = read(case.comm) if case.comm is not None and case.comm.ranks else None
    if reading is None or reading.kind != "mismatch":
        return
    one, other = reading.ranks
    yield diagnosis.finding(
        cause=f"rank {one.rank} waits in {called(one)} where rank {other.rank} waits in {called(other)}",
        evidence=tuple(
            Evidence(source=SOURCE, rank=rank.rank, text=f"{called(rank)}{rank.where} on {rank.host}")
            for rank in reading.ranks
        ),
        confidence=0.9,
        fixes=(Fix(text="see that all ranks run the same dsdoctor and the same libraries"),),
    )


def cured_by(diagnosis: Diagnosis, case: Case, variable: str, what: str, fixes: tuple[Fix, ...]) -> Iterator[Finding]:
    """The check failed as it was asked for and passed with this one variable set, tried on the spot."""
    facts = case.comm
    tried = facts.experiments if facts is not None else ()
    cure = next((one for one in tried if one.passed and set(one.variables) == {variable}), None)
    if facts is None or cure is None:
        return
    yield diagnosis.finding(
        cause=f"the check fails over {facts.backend} and passes with {variable}={cure.variables[variable]}: {what}",
        evidence=(
            Evidence(source=SOURCE, text=f"as configured: {facts.problem}"),
            *(Evidence(source=SOURCE, text=f"{one.name}: {'passes' if one.passed else one.problem}") for one in tried),
        )[:_MAX_EVIDENCE],
        confidence=0.92,
        fixes=fixes,
    )


def _loopback(addresses: tuple[str, ...]) -> bool:
    return bool(addresses) and all(address == "::1" or address.startswith("127.") for address in addresses)


def _suspect(member: Member) -> bool:
    """Its interface is no way to other nodes, or not the one by which it reaches the master itself."""
    return member.interface.kind != "usual" or member.interface.name != member.route.name


def _cut_off(facts: CommFacts) -> bool:
    """This rank could not meet the others, for no reason that has a diagnosis of its own."""
    known = facts.port_taken or facts.resolution is None or facts.resolution.error
    return bool(facts.cannot_meet) and not known and not any(map(_lost_name, facts.members))


def _lost_name(member: Member) -> bool:
    return member.rank > member.local_rank and _loopback(member.master)


def _refused(facts: CommFacts) -> bool:
    return "refused" in facts.cannot_meet


def _member(facts: CommFacts, rank: int) -> Member | None:
    return next((member for member in facts.members if member.rank == rank), None)


def _host(facts: CommFacts, rank: int) -> str:
    member = _member(facts, rank)
    return f"{member.host} (rank {rank})" if member is not None else f"the node of rank {rank}"


def _here(facts: CommFacts) -> str:
    return _host(facts, facts.seen_by) if facts.seen_by is not None else "this node"


def _ranks(numbers: tuple[int, ...]) -> str:
    listed = ", ".join(map(str, numbers[:8])) + (", …" if len(numbers) > 8 else "")
    return f"rank {listed}" if len(numbers) == 1 else f"ranks {listed}"


def _broken(facts: CommFacts, link: Link) -> Evidence:
    text = f"{_host(facts, link.source)} to {_host(facts, link.target)} at {link.address or 'no address'}: {link.error}"
    return Evidence(source=SOURCE, rank=link.target, text=text)


def _resolved(facts: CommFacts, member: Member) -> Evidence:
    text = f"on {member.host}: {facts.master_addr} is {', '.join(member.master)}"
    return Evidence(source=SOURCE, rank=member.rank, text=text)


def _world(member: Member) -> Evidence:
    text = f"on {member.host}, local rank {member.local_rank}: world size {member.world_size}"
    return Evidence(source=SOURCE, rank=member.rank, text=text)
