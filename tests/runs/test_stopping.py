"""When a run ends: after so many attempted steps, later while the loss scale falls, and surely."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from dsdoctor.runs.facts import EngineFacts, Step
from dsdoctor.runs.session import RankSession
from dsdoctor.runs.spec import RunSpec, trace_path
from dsdoctor.runs.stopping import RunStopped, StopRule
from dsdoctor.runs.trace import TraceWriter, read_trace

FP16 = EngineFacts(
    framework="deepspeed",
    config={},
    precision="fp16",
    zero_stage=2,
    optimizer="Adam",
    dynamic_loss_scale=True,
    min_loss_scale=1.0,
)


def ignore(_: float) -> None:
    """Ends no process."""


def rule(folder: Path, *, steps: int, patient: int = 10, end_after: Callable[[float], None] = ignore) -> StopRule:
    spec = RunSpec(script="x", cwd=str(folder), folder=str(folder), config={}, steps=steps, patient_steps=patient)
    return StopRule(RankSession(spec, TraceWriter(trace_path(folder, 0)), 0, 0, 1), end_after)


def clean(index: int) -> Step:
    return Step(index=index, loss_scale=64.0, next_scale=64.0)


def overflow(index: int, scale: float) -> Step:
    return Step(index=index, loss_scale=scale, next_scale=max(1.0, scale / 2), skipped=True)


def steps_until_stop(rule: StopRule, steps: list[Step]) -> int | None:
    for count, step in enumerate(steps, start=1):
        try:
            rule.after_step(step, FP16)
        except RunStopped:
            return count
    return None


def test_stops_after_the_asked_steps(tmp_path: Path) -> None:
    assert steps_until_stop(rule(tmp_path, steps=3), [clean(i) for i in range(9)]) == 3
    assert read_trace(tmp_path, 0).stopped == "steps"


def test_goes_on_while_the_scale_falls_and_stops_when_it_holds(tmp_path: Path) -> None:
    steps = [overflow(i, 2.0 ** (10 - i)) for i in range(5)] + [clean(5), clean(6)]
    assert steps_until_stop(rule(tmp_path, steps=2), steps) == 6


def test_stops_after_an_attempt_at_the_floor(tmp_path: Path) -> None:
    """A wrapper that does not raise at the floor would overflow for ever."""
    steps = [overflow(i, scale) for i, scale in enumerate((4.0, 2.0, 1.0, 1.0, 1.0))]
    assert steps_until_stop(rule(tmp_path, steps=1), steps) == 3


def test_patience_has_an_end(tmp_path: Path) -> None:
    """Hysteresis 0, or a scaler that is stuck: the scale never falls."""
    assert steps_until_stop(rule(tmp_path, steps=2, patient=3), [overflow(i, 65536.0) for i in range(20)]) == 5


def test_static_scale_and_bf16_are_not_waited_for(tmp_path: Path) -> None:
    static = EngineFacts(framework="deepspeed", config={}, precision="bf16", zero_stage=2, optimizer="Adam")
    stop = rule(tmp_path, steps=1)
    with pytest.raises(RunStopped):
        stop.after_step(overflow(0, 128.0), static)


def test_script_that_swallows_the_stop_meets_it_again_and_then_ends(tmp_path: Path) -> None:
    limits: list[float] = []
    stop = rule(tmp_path, steps=1, end_after=limits.append)
    stop.again()
    with pytest.raises(SystemExit):
        stop.after_step(clean(0), FP16)
    assert limits == [60], "the script may clean up, but not for ever"
    for _ in range(2):
        with pytest.raises(RunStopped):
            stop.again()
    assert limits == [60]
    with pytest.raises(RunStopped):
        stop.again()
    assert limits == [60, 0]
