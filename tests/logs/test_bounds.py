"""However much a log holds of a thing, what is kept of it is bounded, and what matters is kept."""

import pytest

from dsdoctor.logs import endings, lines, story, timeline
from dsdoctor.logs.read import read_logs
from dsdoctor.loss_scale import read

FALL = "[rank{0}]: [deepspeed] OVERFLOW! Rank {0} Skipping step. Attempted loss scale: 65536, reducing to 32768\n"
MEMORY = "CPU Virtual Memory:  used = {:.2f} GB, percent = 50.0%\n"


def facts(tmp_path, text):
    path = tmp_path / "a.log"
    path.write_text(text)
    return read_logs([path])


def test_events_of_one_kind_do_not_keep_out_another(tmp_path):
    count = story.MAX_EVENTS + 500
    text = "".join(MEMORY.format(at / 7) for at in range(count)) + "slurmstepd: error: Detected 1 oom_kill event\n"
    got = facts(tmp_path, text)
    memory = list(got.of_kind("host-memory"))
    assert len(memory) == story.MAX_EVENTS + 1
    assert memory[-1].line == count
    assert [event.line for event in got.of_kind("oom-kill")] == [count + 1]


def test_ranks_without_end(tmp_path, monkeypatch):
    monkeypatch.setattr(timeline, "MAX_ATTEMPTS", 100)
    monkeypatch.setattr(lines, "MAX_OPEN", 50)
    monkeypatch.setattr(story, "MAX_RANKS", 60)
    trace = "[rank{0}]: Traceback (most recent call last):\n[rank{0}]: {{\n"
    text = FALL.format(7) * 2 + "".join(FALL.format(rank) + trace.format(rank) for rank in range(500))
    got = facts(tmp_path, text)
    assert len(got.ranks) <= 61
    assert got.loss_scale is not None


def test_overflows_without_end_keep_those_of_the_rank_that_tells_most(monkeypatch):
    monkeypatch.setattr(timeline, "MAX_ATTEMPTS", 30)
    scale = timeline.ScaleTimeline()
    for at in range(100):
        for rank in (0, 1) if at % 2 else (0,):
            scale.add((rank,), timeline.Overflow(at, 8.0, 8.0, at, "a", "", False))
    lines = scale.lines(None)
    assert [line.step for line in lines] == [*range(29), 99]
    assert len(lines) + scale.unlisted(lines) == 100


@pytest.mark.parametrize("code", [1, 137])
def test_exits_without_end(tmp_path, code):
    text = "".join(
        f"srun: error: n1: task {at}: Exited with exit code {code}\n" for at in range(endings.MAX_EXITS + 100)
    )
    exits = facts(tmp_path, text).exits
    assert len(exits) == endings.MAX_EXITS
    assert exits[0].rank == 0


def test_all_skipped_steps_are_counted_though_not_all_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(timeline, "MAX_ATTEMPTS", 40)
    text = "".join(f"step {at} loss 1.5\n" + FALL.format(0) for at in range(1, 101)) + "step 900 loss 1.5\n"
    history = facts(tmp_path, text).loss_scale
    assert (len(history.attempts), history.attempts[-1].step) == (40, 100)
    assert read(history).skipped == 100
