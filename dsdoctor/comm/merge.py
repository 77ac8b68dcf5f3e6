"""From the records of the ranks and of their attendants to facts: which steps each made, how it ended. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dsdoctor.comm.facts import CommRank, CommStep, Ending, RankGpu, StepStatus
from dsdoctor.comm.order import LAST_STEP
from dsdoctor.runs.attendance import Attendance

Records = Sequence[Mapping[str, Any]]

_STOPPED = ("T", "t")


def merge(records: Sequence[Records], attendances: Sequence[Attendance]) -> tuple[CommRank, ...]:
    """One `CommRank` for each list of records and what is known of its process, the rank being the place in both."""
    seen = _seen_by_peers(records)
    pairs = zip(records, attendances, strict=True)
    return tuple(
        _rank(rank, own, process, process.state or seen.get(rank, "")) for rank, (own, process) in enumerate(pairs)
    )


def _rank(rank: int, records: Records, process: Attendance, state: str) -> CommRank:
    chosen = next((record for record in records if record["event"] == "chosen"), {})
    asked = next((record for record in records if record["event"] == "asked"), {})
    steps = _steps(records)
    return CommRank(
        rank=rank,
        pid=process.pid,
        host=process.host,
        device=chosen.get("device", ""),
        gpu=_gpu(records),
        exit_code=process.exit_code,
        ending=_ending(records, steps, process, state),
        time=max((record["time"] for record in records), default=None),
        steps=steps,
        calls=tuple(asked.get("calls", ())),
        ras=asked.get("ras", ""),
    )


def _gpu(records: Records) -> RankGpu | None:
    bound = next((record for record in records if record["event"] == "bound"), None)
    return RankGpu(uuid=bound["uuid"], free_bytes=bound["free"], total_bytes=bound["total"]) if bound else None


def _steps(records: Records) -> tuple[CommStep, ...]:
    """Every step that was begun. One without an end is `unfinished`, or `timeout` where the watchdog says so."""
    steps: list[CommStep] = []
    for record in records:
        name, dtype = record.get("step", ""), record.get("dtype", "")
        if record["event"] == "begin":
            steps.append(CommStep(name=name, dtype=dtype, elements=record.get("elements", 0), status="unfinished"))
        elif record["event"] == "end":
            steps[-1:] = [_ended(steps[-1], record, record["status"])]
        elif record["event"] in ("timeout", "terminated") and name and steps:
            status: StepStatus = "timeout" if record["event"] == "timeout" else "unfinished"
            steps[-1:] = [_ended(steps[-1], record, status)]
    return tuple(steps)


def _ended(begun: CommStep, record: Mapping[str, Any], status: StepStatus) -> CommStep:
    return replace(
        begun,
        status=status,
        seconds=round(record["seconds"], 3),
        text=record.get("text", ""),
        stack=record.get("stack", ""),
    )


def _ending(records: Records, steps: Sequence[CommStep], process: Attendance, state: str) -> Ending:
    if not process.began:
        return "never-started"
    events = {record["event"] for record in records}
    if steps and (steps[-1].status == "failed" or (steps[-1].name == LAST_STEP and steps[-1].status == "passed")):
        return "finished"
    if "timeout" in events:
        return "gave-up"
    if state in _STOPPED:
        return "stopped"
    if "terminated" in events:
        return "terminated"
    return "died" if process.exit_code is not None and process.told is None and not process.deserted else "silent"


def _seen_by_peers(records: Sequence[Records]) -> dict[int, str]:
    """What the ranks saw of each other's processes when they failed or gave up; the first sight of a rank counts."""
    sights = [(record["time"], record["peers"]) for own in records for record in own if record.get("peers")]
    seen: dict[int, str] = {}
    for _, peers in sorted(sights, key=lambda sight: sight[0]):
        for rank, state in peers.items():
            seen.setdefault(int(rank), state)
    return seen
