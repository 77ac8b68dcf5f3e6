"""What the flight recorders say: real ranks that stand still over gloo, and dumps as torch writes them for NCCL."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dsdoctor.case import Case
from dsdoctor.diagnoses import diagnose
from dsdoctor.runs import supervise
from dsdoctor.runs.collectives import apart, parse, read_collectives
from dsdoctor.runs.facts import Collective, RankRun, Run
from dsdoctor.runs.launcher import LaunchPlan
from dsdoctor.runs.spec import RunSpec, collectives_path
from dsdoctor.runs.supervise import Limits
from tests.runs.child_run import write_script

BOTH_MEET = """
    import time
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    pair = dist.new_group([0, 1])
    for _ in range(30):
        dist.all_reduce(torch.ones(4))
    dist.broadcast(torch.ones(2, 3), 0, group=pair)

    def part():
    {then}

    part()
    """


def stand_still(tmp_path: Path, then: str, monkeypatch: pytest.MonkeyPatch) -> Run:
    lines = [f"        {line}" for line in then.splitlines()]
    write_script(tmp_path, BOTH_MEET.replace("    {then}", "\n".join(lines)))
    monkeypatch.setattr(supervise, "_START_SECONDS", 15.0)
    spec = RunSpec(script="train.py", cwd=str(tmp_path), folder=str(tmp_path / "run"), config={})
    limits = Limits(timeout=120, stall=5)
    return supervise.supervise(spec, LaunchPlan(nproc=2, device="cpu"), limits, "with-deepspeed")


@pytest.mark.full
def test_rank_that_has_not_come_so_far_is_named_with_its_last_collective(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = stand_still(tmp_path, "time.sleep(900 * rank)\ndist.all_reduce(torch.ones(5, 7))", monkeypatch)

    assert run.outcome == "hung", run.why
    pair = apart(run.ranks)
    assert pair is not None
    assert (pair.waits, pair.other, pair.differ) == (0, 1, False)
    expected = Collective(
        group="0", group_name="default_pg", number=31, operation="all_reduce", sizes=((5, 7),), dtypes=("Float",)
    )
    assert pair.waiting == expected
    assert pair.theirs is not None
    assert (pair.theirs.number, pair.theirs.sizes, pair.theirs.finished) == (30, ((4,),), True)
    assert [rank.stack[-1].text for rank in run.ranks][1] == "time.sleep(900 * rank)"
    (finding,) = diagnose(Case(runs=(run,))).findings
    assert finding.id == "hang/stalled-rank"
    told = [evidence.text for evidence in finding.evidence]
    assert "it waits in all_reduce of 5x7 Float (number 31 of the default group)" in told[0]
    assert "its last collective was broadcast of 2x3 Float (number 1 of group 1)" in told[1]


def test_different_calls_of_one_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    then = "if rank:\n    dist.barrier()\nelse:\n    dist.broadcast(torch.ones(6), 1)"
    run = stand_still(tmp_path, then, monkeypatch)

    assert run.outcome == "hung", run.why
    pair = apart(run.ranks)
    assert pair is not None
    assert pair.differ
    (finding,) = diagnose(Case(runs=(run,))).findings
    assert finding.id == "comm/collective-mismatch"
    assert "broadcast of 6 Float (number 31 of the default group)" in finding.cause
    assert "barrier" in finding.cause


def entry(number: int, operation: str = "nccl:all_reduce", **values: Any) -> dict[str, Any]:
    """As the recorder of torch 2.5 to 2.13 writes one (FlightRecorderDetail.hpp, `dump_json`)."""
    return {
        "process_group": ["0", "default_pg"],
        "collective_seq_id": number,
        "is_p2p": False,
        "profiling_name": operation,
        "input_sizes": [[1024]],
        "input_dtypes": ["Half"],
        "state": "completed",
        "retired": False,
        "time_created_ns": number,
        **values,
    }


def rank(number: int, *entries: dict[str, Any]) -> RankRun:
    return RankRun(rank=number, collectives=parse([{"entries": list(entries)}]))


def test_order_and_state_of_nccls_entries() -> None:
    late, early = entry(8, state="started"), entry(7)
    send = entry(3, "nccl:send 0->1", is_p2p=True, time_created_ns=99)
    calls = parse([{"entries": [send, late, early]}])
    assert [(call.number, call.operation, call.finished) for call in calls] == [
        (7, "all_reduce", True),
        (8, "all_reduce", False),
    ]


def test_other_sizes_differ_unless_they_may() -> None:
    for operation, differ in (("nccl:_all_gather_base", True), ("nccl:all_to_all", False), ("nccl:gather", False)):
        waits = entry(8, operation, state="started")
        found = apart([rank(0, waits), rank(1, {**waits, "input_sizes": [[512]]})])
        assert (found is not None and found.differ) == differ, operation


def test_ranks_at_the_same_call_are_not_apart() -> None:
    assert apart([rank(0, entry(8, state="started")), rank(1, entry(8, state="started"))]) is None


def test_rank_outside_the_group_is_not_behind() -> None:
    waits = entry(8, state="started", process_group=["7", "expert"])
    assert apart([rank(0, waits), rank(1, entry(3))]) is None


def test_unreadable_dump_is_none(tmp_path: Path) -> None:
    assert read_collectives(tmp_path, 0) == ()
    collectives_path(tmp_path, 0).write_text("[{")
    assert read_collectives(tmp_path, 0) == ()
    collectives_path(tmp_path, 0).write_text(json.dumps([{"version": "2.10", "pg_status": {}}]))
    assert read_collectives(tmp_path, 0) == ()
