from __future__ import annotations

import math

from dsdoctor.loss_scale import read
from dsdoctor.runs.facts import EngineFacts, Failure, Step
from dsdoctor.runs.scale import history

FP16 = EngineFacts(
    framework="deepspeed",
    config={"fp16": {"enabled": True, "initial_scale_power": 3, "hysteresis": 1}},
    precision="fp16",
    zero_stage=0,
    optimizer="Adam",
    dynamic_loss_scale=True,
    min_loss_scale=1.0,
)


def step(index: int, scale: float | None, following: float | None = None, loss: float = 1.0) -> Step:
    skipped = following is not None
    return Step(index=index, losses=(loss,), loss_scale=scale, next_scale=following or scale, skipped=skipped)


def test_search_of_the_scale_is_told_with_its_config() -> None:
    steps = (step(0, 8.0, 4.0), step(1, 4.0, 2.0), step(2, 2.0), step(3, 2.0))

    told = history("with-deepspeed", FP16, steps, None, ended=True)

    assert told is not None
    assert [(a.step, a.scale, a.next_scale) for a in told.attempts] == [(0, 8.0, 4.0), (1, 4.0, 2.0)]
    assert (told.steps_seen, told.initial_power, told.window, told.hysteresis, told.floor) == (4, 3, 1000, 1, 1.0)
    assert told.loss_finite is True
    assert read(told).pattern == "warmup"
    assert read(told).settled_at == 2.0


def test_exception_at_the_smallest_scale_is_the_last_attempt() -> None:
    # The step that raises is traced too: its scale was attempted, and nothing followed.
    raising = Step(index=2, losses=(1.0,), loss_scale=1.0)
    steps = (step(0, 4.0, 2.0), step(1, 2.0, 1.0), raising)
    text = "Current loss scale already at minimum - cannot decrease scale anymore. Exiting run."
    failure = Failure(rank=1, type="Exception", message=text, step=2)

    told = history("with-deepspeed", FP16, steps, failure, ended=True)

    assert told is not None
    assert [(a.step, a.scale, a.raised) for a in told.attempts][-1] == (2, 1.0, True)
    assert told.steps_seen == 3
    assert read(told).pattern == "collapse"
    assert read(told).skipped == 2


def test_another_exception_is_no_attempt() -> None:
    told = history("x", FP16, (step(0, 8.0),), Failure(rank=0, type="KeyError", message="'a'"), ended=True)
    assert told is not None
    assert told.attempts == ()


def test_loss_that_is_not_finite_is_said() -> None:
    told = history("x", FP16, (step(0, 8.0, 4.0, loss=math.nan),), None, ended=True)
    assert told is not None
    assert told.loss_finite is False


def test_run_without_a_scale_has_no_history() -> None:
    assert history("x", FP16, (step(0, None),), None, ended=True) is None
    assert history("x", FP16, (), None, ended=True) is None
