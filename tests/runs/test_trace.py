"""What a rank writes is what the parent reads, and a broken or missing file is never an error."""

from __future__ import annotations

import math
import os
from pathlib import Path

from dsdoctor.finding import FirstBad
from dsdoctor.numerics.examined import Examined, Trial
from dsdoctor.runs.facts import EngineFacts, Failure, Frame, ModelFacts, Step
from dsdoctor.runs.spec import trace_path
from dsdoctor.runs.trace import Contained, TraceWriter, read_trace

MODEL = ModelFacts(class_name="Net", parameters=10, trainable=8, largest_layer=6, dtypes=(("float32", 10),))
FACTS = EngineFacts(
    framework="deepspeed", config={"a": 1}, precision="fp16", zero_stage=2, optimizer="Adam", dynamic_loss_scale=True
)


def begin(folder: Path, rank: int = 0) -> TraceWriter:
    writer = TraceWriter(trace_path(folder, rank))
    writer.start(rank=rank, local_rank=rank, world_size=2, host="box", versions={"torch": "2.13.0"})
    return writer


def test_round_trip_of_every_event(tmp_path: Path) -> None:
    step = Step(index=0, losses=(1.5, 2.5), grad_norm=3.0, loss_scale=256.0, next_scale=128.0, skipped=True, lr=0.1)
    first = FirstBad(rank=1, step=3, micro_step=0, phase="forward", module="a.b", tensor="output", kind="inf", op="log")
    inner = Failure(rank=1, type="ValueError", message="inner", time=None)
    failure = Failure(
        rank=1, type="KeyError", message="'x'", frames=(Frame(file="t.py", line=3, function="f", text="d['x']"),)
    )
    writer = begin(tmp_path, 1)
    writer.note("changed")
    writer.initialize(MODEL, FACTS)
    writer.enter("forward", 0, 1)
    writer.step(step)
    examined = Examined(again="not-finite", samples=(3,), trials=(Trial(remedy="eps", text="", outcome="finite"),))
    writer.first_bad(first, "frames", "patch", examined)
    writer.contained("torch.save", "a.pt", "saved/a.pt")
    writer.failure(Failure(**vars(failure) | {"chain": (inner,)}))
    writer.finish(1)

    trace = read_trace(tmp_path, 1)

    assert (trace.started, trace.local_rank, trace.world_size, trace.pid, trace.host) == (
        True,
        1,
        2,
        os.getpid(),
        "box",
    )
    assert trace.versions == (("torch", "2.13.0"),)
    assert trace.notes == ("changed",)
    assert (trace.model, trace.facts, trace.called_engine) == (MODEL, FACTS, True)
    assert trace.steps == (step,)
    assert (trace.first_bad, trace.frames_report, trace.patch) == (first, "frames", "patch")
    assert trace.examined == examined
    assert trace.contained == (Contained(what="torch.save", original="a.pt", replacement="saved/a.pt"),)
    assert trace.failure is not None
    assert (trace.failure.type, trace.failure.frames, trace.failure.rank) == ("KeyError", failure.frames, 1)
    assert [link.message for link in trace.failure.chain] == ["inner"]
    assert (trace.finish_code, trace.completed) == (1, False)


def test_where_it_stands_is_the_last_enter(tmp_path: Path) -> None:
    writer = begin(tmp_path)
    assert read_trace(tmp_path, 0).last_phase == "script"
    writer.enter("forward", 4, 1)
    writer.enter("backward", 4, 1)
    trace = read_trace(tmp_path, 0)
    assert (trace.last_phase, trace.last_step, trace.last_micro_step) == ("backward", 4, 1)
    assert not trace.completed


def test_stop_is_completion(tmp_path: Path) -> None:
    begin(tmp_path).stop("steps")
    trace = read_trace(tmp_path, 0)
    assert (trace.stopped, trace.last_phase, trace.completed) == ("steps", "stopped", True)


def test_non_finite_numbers_survive(tmp_path: Path) -> None:
    begin(tmp_path).step(Step(index=0, losses=(math.nan, math.inf), grad_norm=-math.inf))
    (step,) = read_trace(tmp_path, 0).steps
    assert math.isnan(step.losses[0])
    assert step.losses[1] == math.inf
    assert step.grad_norm == -math.inf


def test_cut_last_line_is_passed_over(tmp_path: Path) -> None:
    writer = begin(tmp_path)
    writer.step(Step(index=0, losses=(1.0,)))
    writer.step(Step(index=1, losses=(2.0,)))
    path = trace_path(tmp_path, 0)
    path.write_bytes(path.read_bytes()[:-20])
    assert [step.index for step in read_trace(tmp_path, 0).steps] == [0]


def test_missing_file_is_a_rank_that_never_started(tmp_path: Path) -> None:
    trace = read_trace(tmp_path, 7)
    assert (trace.rank, trace.started, trace.last_phase, trace.completed) == (7, False, "not started", False)


def test_odd_lines_do_not_hide_the_good_ones(tmp_path: Path) -> None:
    writer = begin(tmp_path)
    with trace_path(tmp_path, 0).open("a") as file:
        file.write('[1]\n{"t": 1}\n{"event": "step", "t": 1}\n\x00\xff garbage\n')
    writer.step(Step(index=5))
    assert [step.index for step in read_trace(tmp_path, 0).steps] == [5]


def test_writer_never_raises(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "no" / "such" / "folder" / "trace.jsonl")
    writer.note("lost")
    writer.write("odd", value=object(), text="\ud800")


def test_config_that_json_cannot_hold_is_still_written(tmp_path: Path) -> None:
    facts = EngineFacts(**vars(FACTS) | {"config": {"device": object}})
    begin(tmp_path).initialize(MODEL, facts)
    trace = read_trace(tmp_path, 0)
    assert trace.facts is not None
    assert "object" in trace.facts.config["device"]
