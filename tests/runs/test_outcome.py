"""What became of a run, from hand-made traces and notes of attendants. The clock starts at 0 and the work at 10."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from dsdoctor.runs import outcome
from dsdoctor.runs.attendance import Attendance
from dsdoctor.runs.facts import Failure, Outcome, RankRun
from dsdoctor.runs.outcome import Ended, Reason
from dsdoctor.runs.trace import RankTrace

LAUNCHER_FAILED = Ended(reason="launcher", time=20.0, launcher_exit=1)
LAUNCHER_DONE = Ended(reason="launcher", time=20.0, launcher_exit=0)


def trace(rank: int, **values: Any) -> RankTrace:
    return RankTrace(rank=rank, **{"started": True, "last_phase": "forward", **values})


def failed(rank: int, when: float, kind: str = "ValueError") -> RankTrace:
    return trace(rank, failure=Failure(rank=rank, type=kind, message="bad\nsecond line", time=when))


def seen(rank: int, code: int | None, ended: float | None = None, **values: Any) -> Attendance:
    return Attendance(rank=rank, pid=100 + rank, exit_code=code, ended=ended, **values)


def judge(traces: list[RankTrace], attendance: list[Attendance], ended: Ended) -> tuple[Outcome, str, list[RankRun]]:
    ranks = [outcome.rank_run(a, b, ended) for a, b in zip(traces, attendance, strict=True)]
    first = next(iter(outcome.troubles(ranks, traces, attendance)), None)
    result = outcome.outcome(ranks, traces, first, ended)
    return result, outcome.why(result, first, ended, ranks, "last words"), ranks


def test_first_exception_wins_over_those_it_caused() -> None:
    traces = [failed(0, 15.2, "RuntimeError"), failed(1, 15.0)]

    result, why, _ = judge(traces, [seen(0, 1, 15.6), seen(1, 1, 15.1)], LAUNCHER_FAILED)

    assert (result, why) == ("raised", "rank 1 raised ValueError: bad")


def test_kill_comes_before_an_exception_that_was_noticed_a_little_earlier() -> None:
    """The peers lose the connection before the death can be noted: the kernel closes sockets first."""
    traces = [failed(0, 15.0, "RuntimeError"), trace(1)]

    result, why, _ = judge(traces, [seen(0, 1, 15.4), seen(1, -9, 15.1)], LAUNCHER_FAILED)

    assert (result, why) == ("killed", "rank 1 was ended by signal 9 (SIGKILL)")


def test_script_that_ends_itself_comes_before_the_peer_that_it_leaves_alone() -> None:
    """Its process lives on for a second or two: handlers, threads, the interpreter."""
    traces = [trace(0, finish_code=1, finish_time=15.0), failed(1, 15.3, "RuntimeError")]

    result, why, _ = judge(traces, [seen(0, 1, 16.8), seen(1, 1, 15.9)], LAUNCHER_FAILED)

    assert (result, why) == ("exited", "rank 0 ended with exit code 1")


def test_script_that_ends_itself_for_a_lost_peer_comes_after_it() -> None:
    traces = [trace(0, finish_code=1, finish_time=15.3), failed(1, 15.0)]

    result, _, _ = judge(traces, [seen(0, 1, 15.5), seen(1, 1, 16.8)], LAUNCHER_FAILED)

    assert result == "raised"


def test_abort_of_a_peer_comes_after_the_exception() -> None:
    traces = [trace(0), failed(1, 15.05)]

    result, _, ranks = judge(traces, [seen(0, -6, 15.0), seen(1, 1, 15.2)], LAUNCHER_FAILED)

    assert result == "raised"
    assert [rank.ended_by_us for rank in ranks] == [False, False]


def test_rank_that_was_told_to_go_is_a_victim() -> None:
    traces = [trace(0), failed(1, 15.0)]

    _, _, ranks = judge(traces, [seen(0, -15, 15.3, told=15.2), seen(1, 1, 15.1)], LAUNCHER_FAILED)

    assert [(rank.exit_code, rank.ended_by_us) for rank in ranks] == [(-15, True), (1, False)]


def test_exception_that_answers_the_request_to_go_is_no_cause() -> None:
    traces = [failed(0, 15.3, "KeyboardInterrupt"), trace(1)]

    result, _, ranks = judge(traces, [seen(0, 1, 15.4, told=15.2), seen(1, 3, 15.1)], LAUNCHER_FAILED)

    assert result == "exited"
    assert ranks[0].ended_by_us


def test_exception_before_the_request_to_go_is_its_own() -> None:
    """The launcher tells a rank that is still cleaning up after its own exception."""
    _, _, ranks = judge([failed(0, 15.0)], [seen(0, -15, 15.3, told=15.2)], LAUNCHER_FAILED)
    assert not ranks[0].ended_by_us


def test_exit_code_of_the_script_is_no_exception() -> None:
    result, why, _ = judge([trace(0, finish_code=2)], [seen(0, 2, 15.0)], LAUNCHER_FAILED)
    assert (result, why) == ("exited", "rank 0 ended with exit code 2")


def test_attendant_that_vanished_was_killed_with_its_rank() -> None:
    result, _, ranks = judge([trace(0)], [seen(0, None)], LAUNCHER_FAILED)
    assert (result, ranks[0].exit_code) == ("killed", -signal.SIGKILL)


def test_what_happens_after_the_work_is_done_proves_nothing() -> None:
    traces = [trace(0, stopped="steps"), trace(1, stopped="steps")]

    result, why, ranks = judge(traces, [seen(0, -6, 15.0), seen(1, -15, 15.2, told=15.1)], LAUNCHER_FAILED)

    assert (result, why) == ("stopped", "")
    assert not any(rank.ended_by_us for rank in ranks)


def test_script_that_ends_by_itself_is_finished() -> None:
    assert judge([trace(0, finish_code=0)], [seen(0, 0, 15.0)], LAUNCHER_DONE)[0] == "finished"


@pytest.mark.parametrize(
    ("reason", "text"),
    [("hung", "no progress of any rank for 60 s"), ("timeout", "not done after 60 s, no optimizer step made")],
)
def test_ranks_still_there_are_ended_by_us(reason: Reason, text: str) -> None:
    traces = [
        trace(0, last_phase="backward"),
        trace(1, finish_code=0),
        trace(2, last_phase="script"),
        trace(3, last_phase="not started"),
    ]
    told = [seen(rank, -15, 20.1, told=20.05) for rank in (0, 2, 3)]

    ended = Ended(reason=reason, time=20, limit=60, quiet={0: 60.5})
    result, why, ranks = judge(traces, [told[0], seen(1, 0, 15.0), *told[1:]], ended)

    assert result == reason
    assert why == f"{text}: rank 0 in backward, rank 2 in the script, rank 3 not started"
    assert [rank.quiet for rank in ranks[:2]] == [60.5, None]
    assert [(rank.exit_code, rank.ended_by_us) for rank in ranks[:2]] == [(None, True), (0, False)]


def test_failure_before_the_stall_is_what_counts() -> None:
    traces = [trace(0, last_phase="backward"), failed(1, 15.0)]
    result, _, _ = judge(traces, [seen(0, None), seen(1, None)], Ended(reason="hung", time=75))
    assert result == "raised"


def test_settled_run_is_judged_by_its_ranks() -> None:
    """The launcher would not go although one rank failed, or all were done."""
    settled = Ended(reason="settled", time=40)
    assert judge([trace(0), failed(1, 15.0)], [seen(0, None), seen(1, 1, 15.1)], settled)[0] == "raised"
    assert judge([trace(0, stopped="steps")], [seen(0, None)], settled)[0] == "stopped"


def test_stop_for_memory_is_said() -> None:
    result, why, ranks = judge([trace(0)], [seen(0, -15, 20.1)], Ended(reason="memory", time=20))
    assert (result, ranks[0].ended_by_us) == ("out-of-memory", True)
    assert "host memory" in why


def test_no_rank_started() -> None:
    nothing = RankTrace(rank=0)
    result, why, ranks = judge([nothing], [Attendance(rank=0)], LAUNCHER_FAILED)
    assert (result, why) == ("not-started", "no rank was started; the launcher said: last words")
    assert ranks[0].exit_code is None


def test_all_ranks_told_to_go_from_outside() -> None:
    """As a scheduler does: no rank failed, and nothing was done."""
    result, why, _ = judge([trace(0)], [seen(0, -15, 15.1, told=15.0)], LAUNCHER_FAILED)
    assert (result, why) == ("exited", "the launcher ended with exit code 1: last words")


def test_unknown_signal_has_its_number() -> None:
    _, why, _ = judge([trace(0)], [seen(0, -99, 15.0)], LAUNCHER_FAILED)
    assert why == "rank 0 was ended by signal 99"
