"""From the reports of a started check to its facts: the same that a check of our own gives. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dsdoctor.comm.facts import CommFacts, CommRank, CommStep
from dsdoctor.comm.merge import merge
from dsdoctor.comm.speeds import speeds
from dsdoctor.comm.ways import Ways
from dsdoctor.machine.interconnect import parse
from dsdoctor.runs.attendance import Attendance


def facts_of(facts: CommFacts, reports: Mapping[int, Any], *, seconds: float) -> CommFacts:
    """`facts` hold who came; `reports` are what `comm.member` sent of each rank, empty where no rank was let go."""
    if not reports:
        return replace(facts, ranks=_only_met(facts), seconds=seconds)
    records = [reports.get(rank, {}).get("records", []) for rank in range(facts.world_size)]
    chosen: Mapping[str, Any] = next((r for own in records for r in own if r["event"] == "chosen"), {})
    hosts = {member.rank: member.host for member in facts.members}
    processes = [_attendance(rank, reports.get(rank), hosts.get(rank, "")) for rank in range(facts.world_size)]
    ranks = tuple(rank if rank.rank in reports else _lost(rank) for rank in merge(records, processes))
    links = {hosts[rank]: parse(report["gpu_links"]) for rank, report in reports.items() if report.get("gpu_links")}
    ways = Ways(backend=chosen.get("backend", ""), ranks=ranks, members=facts.members, gpu_links=links)
    found = replace(
        facts,
        device=chosen.get("device", ""),
        backend=chosen.get("backend", ""),
        ranks=ranks,
        speeds=speeds(records, [rank.host for rank in ranks], ways.between),
        seconds=seconds,
    )
    return found if found.passed else replace(found, output=_output(reports))


def _only_met(facts: CommFacts) -> tuple[CommRank, ...]:
    """The ranks of a check that ended at the meeting, since someone was missing there or nodes do not fit together."""
    came = {member.rank: member for member in facts.members}
    met = CommStep(name="rendezvous", status="passed" if len(came) == facts.world_size else "timeout")
    return tuple(
        CommRank(rank=rank, host=came[rank].host, ending="gave-up", steps=(met,))
        if rank in came
        else CommRank(rank=rank, ending="never-started")
        for rank in range(facts.world_size)
    )


def _attendance(rank: int, report: Mapping[str, Any] | None, host: str) -> Attendance:
    if report is None:
        return Attendance(rank=rank, host=host)
    return Attendance(
        rank=rank,
        host=host,
        pid=report["pid"],
        exit_code=report["exit_code"],
        state=report["state"],
        told=report["told"],
    )


def _lost(rank: CommRank) -> CommRank:
    """The process beside this rank came to the meeting and never reported."""
    return replace(rank, ending="lost")


def _output(reports: Mapping[int, Any]) -> str:
    """What the ranks printed that did not end well, each under its number."""
    failed = [(rank, report["output"]) for rank, report in sorted(reports.items()) if report["exit_code"] != 0]
    return "\n".join(f"[rank{rank}] {line}" for rank, text in failed for line in text.splitlines()[-15:])
