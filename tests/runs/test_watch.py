from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from dsdoctor.runs.attendance import attendance_path
from dsdoctor.runs.facts import Failure, Step
from dsdoctor.runs.spec import trace_path
from dsdoctor.runs.trace import TraceWriter
from dsdoctor.runs.watch import Watch


def started(folder: Path, rank: int) -> TraceWriter:
    writer = TraceWriter(trace_path(folder, rank))
    writer.start(rank=rank, local_rank=rank, world_size=2, host="here", versions={})
    return writer


def attended(folder: Path, rank: int, **event: Any) -> None:
    with open(attendance_path(folder, rank), "a") as file:
        file.write(json.dumps({"t": 1.0, **event}) + "\n")


def looked(folder: Path, ranks: int = 2) -> Watch:
    watch = Watch(folder=folder, ranks=ranks)
    watch.look()
    return watch


def test_training_begins_with_the_first_forward_pass_of_the_last_rank(tmp_path: Path) -> None:
    first, second = started(tmp_path, 0), started(tmp_path, 1)
    watch = looked(tmp_path)
    assert not watch.all_began_training

    first.enter("forward", 0, 0)
    watch.look()
    assert not watch.all_began_training

    second.enter("forward", 0, 0)
    watch.look()
    assert watch.all_began_training


def test_a_rank_that_is_done_need_not_train(tmp_path: Path) -> None:
    started(tmp_path, 0).enter("forward", 0, 0)
    started(tmp_path, 1).stop("probe")
    assert looked(tmp_path).all_began_training


def test_steps_are_counted_as_they_come(tmp_path: Path) -> None:
    watch = looked(tmp_path)
    assert watch.steps == 0

    first = started(tmp_path, 0)
    for index in range(2):
        first.step(Step(index=index))
        watch.look()
        assert watch.steps == index + 1


def test_line_that_is_not_whole_yet_is_read_later(tmp_path: Path) -> None:
    watch = looked(tmp_path)
    with open(trace_path(tmp_path, 0), "w") as file:
        file.write('{"event": "st')
        file.flush()
        watch.look()
        file.write('ep"}\n')
    watch.look()
    assert watch.steps == 1


def test_each_rank_is_quiet_for_as_long_as_it_writes_nothing(tmp_path: Path) -> None:
    watch = looked(tmp_path)
    time.sleep(0.05)
    (tmp_path / "stdout-rank1.txt").write_text("here\n")
    watch.look()
    quiet = watch.quiet()
    assert quiet[0] >= 0.05 > quiet[1]


def test_growth_of_trace_or_output_of_any_rank_is_progress(tmp_path: Path) -> None:
    watch = looked(tmp_path)
    for name in ("trace-rank0.jsonl", "stdout-rank1.txt", "stderr-rank0.txt"):
        before = watch.last_progress
        watch.look()
        assert watch.last_progress == before
        time.sleep(0.001)
        (tmp_path / name).write_text("x")
        watch.look()
        assert watch.last_progress > before


def test_all_ranks_done_decides(tmp_path: Path) -> None:
    first, second = started(tmp_path, 0), started(tmp_path, 1)
    first.stop("steps")
    assert looked(tmp_path).decided is None
    second.finish(0)
    assert looked(tmp_path).decided is not None


def test_failure_of_one_rank_decides(tmp_path: Path) -> None:
    started(tmp_path, 0)
    started(tmp_path, 1).failure(Failure(rank=1, type="KeyError", message="x"))
    assert looked(tmp_path).decided is not None


def test_bad_end_of_a_process_decides_unless_its_work_was_done(tmp_path: Path) -> None:
    done = started(tmp_path, 0)
    started(tmp_path, 1)
    done.stop("steps")
    attended(tmp_path, 0, event="end", exit_code=-6, deserted=False)
    assert looked(tmp_path).decided is None

    attended(tmp_path, 1, event="end", exit_code=-9, deserted=False)
    assert looked(tmp_path).decided is not None


def test_rank_that_ends_well_while_another_goes_on_decides_nothing(tmp_path: Path) -> None:
    """That is for the stall limit: the others may have more batches."""
    started(tmp_path, 0).finish(0)
    attended(tmp_path, 0, event="end", exit_code=0, deserted=False)
    started(tmp_path, 1)
    assert looked(tmp_path).decided is None
