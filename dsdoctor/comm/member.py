"""One process of a check that a launcher started on every node: beside its rank, which it starts, watches and ends.

All of them meet first, without any collective: who came, what differs between the nodes, which nodes can connect to
which. Only then the ranks are let go (`comm.rank`). Each process reports what became of its rank; rank 0's puts it all
together and speaks for everyone. Where rank 0 cannot be reached, one process of each node says what it knows.

Every wait is limited by the deadline of a step, or by the few seconds that a message takes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from dsdoctor.comm import interfaces, links, members
from dsdoctor.comm.child import NCCL_OUTPUT, OUTPUT, RankChild
from dsdoctor.comm.facts import CommFacts, Resolution
from dsdoctor.comm.gather import facts_of
from dsdoctor.comm.links import Link, Listener
from dsdoctor.comm.meeting import MESSAGE_SECONDS, CannotMeet, Meeting, loss_of_rank_0, store
from dsdoctor.comm.members import Member
from dsdoctor.comm.order import order_for, read_records
from dsdoctor.comm.place import port_trouble, resolve
from dsdoctor.comm.speaker import Speaker
from dsdoctor.comm.started import Started
from dsdoctor.machine import interconnect

_LINK_SECONDS = 5.0
_START_SECONDS = 60.0
"""How much later than the first process the last may be started; a node's launcher may be slow."""
_LOOK_EVERY = 0.1
_OUTPUT_LINES = 40
_NCCL_LINES = 150
"""From both ends, of each rank that failed: what NCCL chose, what went wrong, and not too much of a thousand ranks."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What the check has to do, the same on every rank. `deadline` in seconds, for each step."""

    config: Mapping[str, Any]
    device: Literal["auto", "cpu", "cuda"]
    deadline: float


@contextlib.contextmanager
def take_part(place: Started, task: Task) -> Iterator[Speaker]:
    """Go through the whole check as the rank that a launcher made of this process. Raises ImportError without torch."""
    with tempfile.TemporaryDirectory(prefix="dsdoctor-comm-") as name, _told_to_end() as told:
        folder = Path(name)
        import torch  # noqa: F401  (read before the fork, so that it is read once)

        with RankChild(place, folder) as child:
            yield _Part(place, task, folder, child, told).run()


class _Part:
    """The way of one process through the check, from the first look at the network to the reports."""

    def __init__(self, place: Started, task: Task, folder: Path, child: RankChild, told: _Told) -> None:
        self._place = place
        self._task = task
        self._folder = folder
        self._child = child
        self._told = told
        self._begun = time.monotonic()
        master = resolve(place.master_addr)
        self._me = _introduction(place, task, master)
        self._facts = CommFacts(
            world_size=place.world_size,
            asked_device=task.device,
            master_addr=place.master_addr,
            master_port=place.master_port,
            resolution=master,
            members=(self._me,),
            deadline=task.deadline,
        )

    def run(self) -> Speaker:
        try:
            self._look_at_the_master()
            with self._listener() as port, loss_of_rank_0():
                meeting = Meeting(store(self._place, self._task.deadline), self._place.rank)
                meeting.join(replace(self._me, port=port).write())
                if self._place.rank == 0:
                    return self._lead(meeting)
                self._follow(meeting)
                return Speaker(meeting, None, 0, self._task.deadline)
        except CannotMeet as error:
            return self._alone(str(error))

    def _look_at_the_master(self) -> None:
        """Does its name resolve, is its port free (on rank 0), does it answer (elsewhere). Raises CannotMeet."""
        found, place = self._facts.resolution, self._place
        if found is not None and found.error:
            raise CannotMeet(f"{place.master_addr} does not resolve: {found.error}")
        if place.rank == 0 and not place.agent_store:
            trouble = port_trouble(place.master_port)
            if trouble:
                self._facts = replace(self._facts, port_taken=trouble)
                raise CannotMeet(trouble)
            return
        error = links.connect_error(place.master_addr, place.master_port, self._task.deadline)
        if error:
            raise CannotMeet(f"connecting to {place.master_addr}:{place.master_port}: {error}")

    @contextlib.contextmanager
    def _listener(self) -> Iterator[int | None]:
        """The port on which the leader of a node listens; None for others, and where it has no such address."""
        listener = None
        if self._place.leads_node and self._me.address:
            with contextlib.suppress(OSError):
                listener = Listener(self._me.address)
        try:
            yield listener.port if listener is not None else None
        finally:
            if listener is not None:
                listener.close()

    def _alone(self, error: str) -> Speaker:
        """What this process knows by itself. One of each node says it; the others would only say it again."""
        rank = self._place.rank
        facts = replace(self._facts, cannot_meet=error, seen_by=rank, seconds=self._seconds())
        return Speaker(None, facts if self._place.leads_node else None, 0, 0.0, trouble=error)

    # rank 0

    def _lead(self, meeting: Meeting) -> Speaker:
        everyone = self._who_came(meeting)
        self._facts = replace(self._facts, members=everyone)
        broken: tuple[Link, ...] = ()
        go = _complete(everyone, self._place.world_size)
        if go:
            broken = self._broken_links(meeting, everyone)
        meeting.tell("go", go and not broken)
        self._facts = replace(self._facts, broken_links=broken)
        reports: dict[int, Any] = {}
        if go and not broken:
            reports = self._reports(meeting, everyone)
        facts = facts_of(self._facts, reports, seconds=self._seconds())
        return Speaker(meeting, facts, len(reports or everyone) - 1, self._task.deadline, self._nccl_logs(reports))

    def _who_came(self, meeting: Meeting) -> tuple[Member, ...]:
        found = meeting.joined(self._place.world_size, self._task.deadline)
        everyone = sorted((Member.read(one) for one in found), key=lambda member: member.rank)
        said = time.time()
        meeting.tell("members", [member.write() for member in everyone])
        woken = meeting.reports("clock", (m.rank for m in everyone if m.rank != 0), MESSAGE_SECONDS)
        clocks = {rank: round(clock - said, 2) for rank, clock in woken.items()} | {0: 0.0}
        return tuple(replace(member, clock=clocks.get(member.rank)) for member in everyone)

    def _broken_links(self, meeting: Meeting, everyone: tuple[Member, ...]) -> tuple[Link, ...]:
        """All directions between nodes that do not work, as far as their sources could say."""
        self._test_links(meeting, everyone)
        leading = (member.rank for member in members.leaders(everyone))
        told = meeting.reports("links", leading, _LINK_SECONDS + MESSAGE_SECONDS)
        return tuple(Link(**link) for _, own in sorted(told.items()) for link in own if link["error"])

    def _reports(self, meeting: Meeting, everyone: tuple[Member, ...]) -> dict[int, Any]:
        """Every rank's report. After a failure the others are told to end, so that theirs follow soon."""
        self._attend(meeting, everyone)
        patience = self._task.deadline if self._child.poll() == 0 else 0.0
        return meeting.reports("report", range(self._place.world_size), patience + MESSAGE_SECONDS)

    def _nccl_logs(self, reports: Mapping[int, Any]) -> Path | None:
        hosts = {member.rank: member.host for member in self._facts.members}
        told = {rank: report["nccl"] for rank, report in reports.items() if report["nccl"]}
        if not told:
            return None
        folder = self._folder / "nccl"
        folder.mkdir()
        for rank, text in told.items():
            (folder / f"nccl.{hosts[rank]}.rank{rank}.log").write_text(text, encoding="utf-8")
        return folder

    # the others

    def _follow(self, meeting: Meeting) -> None:
        told = meeting.hear("members", self._task.deadline + _START_SECONDS)
        if told is None:
            raise CannotMeet("the store of rank 0 answers, and rank 0 itself does not")
        meeting.report("clock", time.time())
        everyone = tuple(map(Member.read, told))
        if _complete(everyone, self._place.world_size):
            self._test_links(meeting, everyone)
        if meeting.hear("go", _LINK_SECONDS + 3 * MESSAGE_SECONDS):
            self._attend(meeting, everyone)

    # everyone

    def _test_links(self, meeting: Meeting, everyone: tuple[Member, ...]) -> None:
        if not self._place.leads_node:
            return
        others = [member for member in members.leaders(everyone) if member.rank != self._place.rank]
        listening = [(member.rank, member.address, member.port) for member in others if member.port is not None]
        tried = list(links.try_all(self._place.rank, listening, _LINK_SECONDS))
        tried += [_deaf(self._place.rank, member) for member in others if member.port is None]
        meeting.report("links", [asdict(link) for link in tried])

    def _attend(self, meeting: Meeting, everyone: tuple[Member, ...]) -> None:
        """Let the rank go, wait for its end, and report it."""
        order_for(
            self._task.config,
            device=self._task.device,
            deadline=self._task.deadline,
            folder=self._folder,
            ranks=self._place.world_size,
            leaders=[member.rank for member in members.leaders(everyone)],
        ).write()
        child, limit = self._child, self._task.deadline + MESSAGE_SECONDS / 2
        state = ""
        self._told.patient = True
        child.go()
        while child.poll() is None:
            if self._told.time or meeting.told("stop") is not None:
                child.wait(1.0)  # it may be about to say by itself what is wrong
                state = child.state
                child.terminate()
                child.wait(1.0)
                child.kill()
            elif child.silence() > limit:
                state = child.state
                child.kill()
            else:
                child.wait(_LOOK_EVERY)
        if child.poll() != 0:
            meeting.tell("stop", self._place.rank)
        meeting.report("report", self._report(state))

    def _report(self, state: str) -> dict[str, Any]:
        records = read_records(self._folder, self._place.rank)
        measured = {record["event"] for record in records} >= {"bound", "measured"}
        return {
            "pid": self._child.pid,
            "records": records,
            "gpu_links": interconnect.ask() if measured and self._place.leads_node else {},
            "exit_code": self._child.poll(),
            "state": state,
            "told": self._told.time,
            "output": self._lines(OUTPUT, 0, _OUTPUT_LINES),
            "nccl": self._lines(NCCL_OUTPUT, _NCCL_LINES, _NCCL_LINES) if self._child.poll() != 0 else "",
        }

    def _lines(self, name: str, first: int, last: int) -> str:
        """So many lines from both ends of a file."""
        with contextlib.suppress(OSError), (self._folder / name).open(encoding="utf-8", errors="replace") as lines:
            return "".join([*islice(lines, first), *deque(lines, maxlen=last)])
        return ""

    def _seconds(self) -> float:
        return round(time.monotonic() - self._begun, 1)


class _Told:
    """Whether the launcher asked this process to end, and when (seconds since the epoch).

    A `patient` process only takes note: it has a rank to see to its end, and something to say of it.
    """

    patient = False
    time: float | None = None


@contextlib.contextmanager
def _told_to_end() -> Iterator[_Told]:
    """SIGTERM ends the rank, and this process after what there is to say was said; before that, it ends at once."""
    told = _Told()

    def note(number: int, _: FrameType | None) -> None:
        if not told.patient:
            raise KeyboardInterrupt(signal.Signals(number).name)
        told.time = told.time or time.time()

    before = signal.signal(signal.SIGTERM, note)
    try:
        yield told
    finally:
        signal.signal(signal.SIGTERM, before)


def _deaf(source: int, member: Member) -> Link:
    what = member.address or f"an interface named {member.interface.name!r}"
    error = f"its node does not have {what}" + (
        f" ({member.interface.forced_by})" if member.interface.forced_by else ""
    )
    return Link(source=source, target=member.rank, address=member.address, error=error)


def _introduction(place: Started, task: Task, master: Resolution) -> Member:
    backend = "nccl" if _uses_cuda(task.device) else "gloo"
    here = interfaces.interfaces()
    way_out = links.route_to(master.addresses[0], place.master_port) if master.addresses else ""
    return members.introduce(
        place,
        config=task.config,
        master=master.addresses,
        devices=_devices(task.device),
        interface=interfaces.chosen(backend, os.environ, here, interfaces.own_address()),
        route=interfaces.with_address(way_out, here),
    )


def _complete(everyone: tuple[Member, ...], world_size: int) -> bool:
    """All ranks came, each once, and all of the same world."""
    return (
        sorted(member.rank for member in everyone) == list(range(world_size)) and members.world_sizes(everyone) is None
    )


def _devices(device: str) -> int | None:
    import torch

    return torch.cuda.device_count() if device != "cpu" else None


def _uses_cuda(device: str) -> bool:
    import torch

    return device == "cuda" or (device == "auto" and torch.cuda.is_available())
