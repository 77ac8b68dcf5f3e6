"""Where a rank is and what its steps did, seen on an engine that is driven by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dsdoctor.runs.observe import Observer
from dsdoctor.runs.session import RankSession
from dsdoctor.runs.spec import RunSpec, trace_path
from dsdoctor.runs.stopping import RunStopped, StopRule
from dsdoctor.runs.trace import TraceWriter, read_trace


class Loss(float):
    """As much of a tensor as is needed: a number that can be detached."""

    def detach(self) -> Loss:
        return self

    clone = detach


def make_engine(accumulation: int = 1) -> Any:
    """An engine of a class of its own, since the classes are patched."""

    class Engine:
        def __init__(self) -> None:
            self.micro_steps = self.skipped_steps = 0
            self.norm: float | None = 2.0
            self.overflows: set[int] = set()
            self.steps = 0
            self.optimizer = SimpleNamespace(cur_scale=64.0, param_groups=[{"lr": 0.5}])

        def is_gradient_accumulation_boundary(self) -> bool:
            return (self.micro_steps + 1) % accumulation == 0

        def get_global_grad_norm(self) -> float | None:
            return self.norm

        def forward(self, x: Any) -> Any:
            return x

        def backward(self, loss: Any) -> Any:
            return loss

        def step(self) -> None:
            if self.is_gradient_accumulation_boundary():
                if self.steps in self.overflows:
                    self.skipped_steps += 1
                    self.optimizer.cur_scale /= 2
                self.steps += 1
            self.micro_steps += 1

    return Engine()


@pytest.fixture
def session(tmp_path: Path) -> RankSession:
    spec = RunSpec(script="x", cwd=str(tmp_path), folder=str(tmp_path), config={}, steps=3, patient_steps=0)
    return RankSession(spec, TraceWriter(trace_path(tmp_path, 0)), 0, 0, 1)


@pytest.fixture
def observer(session: RankSession) -> Observer:
    return Observer(session, StopRule(session, lambda _: None))


def entered(session: RankSession) -> list[tuple[str, int, int]]:
    lines = trace_path(session.spec.folder, 0).read_text().splitlines()
    events = [json.loads(line) for line in lines]
    return [
        (e["phase"], e["step"], e["micro_step"]) for e in events if e["event"] == "enter" and e["phase"] != "script"
    ]


def test_micro_steps_of_an_accumulated_step(session: RankSession, observer: Observer) -> None:
    engine = make_engine(accumulation=2)
    observer.adopt(engine, None)
    for loss in (Loss(1.0), Loss(3.0)):
        engine.forward(1)
        engine.backward(loss)
        engine.step()
    engine.forward(1)
    expected = [("forward", 0, 0), ("backward", 0, 0), ("step", 0, 0)]
    expected += [("forward", 0, 1), ("backward", 0, 1), ("step", 0, 1), ("forward", 1, 0)]
    assert entered(session) == expected
    (step,) = read_trace(session.spec.folder, 0).steps
    assert step.losses == (1.0, 3.0)


def test_script_that_calls_step_only_at_the_boundary(session: RankSession, observer: Observer) -> None:
    """Accelerate does: `backward` for each micro-batch, `step` with the last."""
    engine = make_engine(accumulation=1)
    observer.adopt(engine, None)
    for loss in (1.0, 2.0):
        engine.forward(1)
        engine.backward(Loss(loss))
    engine.step()
    assert [entry for entry in entered(session) if entry[0] != "forward"] == [
        ("backward", 0, 0),
        ("backward", 0, 1),
        ("step", 0, 1),
    ]


def test_skipped_step_and_its_scale(session: RankSession, observer: Observer) -> None:
    engine = make_engine()
    engine.overflows = {1}
    observer.adopt(engine, None)
    for _ in range(2):
        engine.backward(Loss(math.inf))
        engine.step()
    clean, skipped = read_trace(session.spec.folder, 0).steps
    assert (clean.skipped, clean.loss_scale, clean.next_scale, clean.grad_norm) == (False, 64.0, 64.0, 2.0)
    assert (skipped.skipped, skipped.loss_scale, skipped.next_scale) == (True, 64.0, 32.0)
    assert skipped.grad_norm is None, "a finite norm of a skipped step is of an earlier one"
    assert skipped.lr == 0.5


def test_step_without_backward_has_no_losses(session: RankSession, observer: Observer) -> None:
    """`loss.backward()` of the script's own is allowed in recent releases."""
    engine = make_engine()
    observer.adopt(engine, None)
    engine.forward(1)
    engine.step()
    (step,) = read_trace(session.spec.folder, 0).steps
    assert step.losses == ()


def test_step_that_raises_is_kept_without_a_next_scale(session: RankSession, observer: Observer) -> None:
    engine = make_engine()
    engine.optimizer = SimpleNamespace(cur_scale=1.0, param_groups=[])
    type(engine).step = lambda _: 1 / 0
    observer.adopt(engine, None)
    engine.backward(Loss(math.nan))
    with pytest.raises(ZeroDivisionError):
        engine.step()
    trace = read_trace(session.spec.folder, 0)
    (step,) = trace.steps
    assert (step.loss_scale, step.next_scale, step.skipped, step.lr) == (1.0, None, False, None)
    assert math.isnan(step.losses[0])
    assert trace.last_phase == "step"


def test_exception_in_forward_leaves_the_rank_there(session: RankSession, observer: Observer) -> None:
    engine = make_engine()
    type(engine).forward = lambda _, x: 1 / x
    observer.adopt(engine, None)
    with pytest.raises(ZeroDivisionError):
        engine.forward(0)
    assert read_trace(session.spec.folder, 0).last_phase == "forward"


def test_stops_out_of_step_and_again_out_of_the_next_call(session: RankSession, observer: Observer) -> None:
    engine = make_engine()
    observer.adopt(engine, None)
    engine.step()
    engine.step()
    with pytest.raises(RunStopped):
        engine.step()
    with pytest.raises(RunStopped):
        engine.forward(1)
    assert len(read_trace(session.spec.folder, 0).steps) == 3


def test_steps_of_the_optimizer_count_where_the_engine_is_never_stepped(
    session: RankSession, observer: Observer
) -> None:
    """Lightning's Fabric trains like that, and schedules wrap `optimizer.step` as a method of the object."""
    engine = make_engine()

    class Optimizer:
        param_groups, cur_scale, overflow = ({"lr": 0.5},), 8.0, False

        def step(self, closure: object = None) -> str:
            self.overflow = not self.overflow
            return f"stepped with {closure}"

    engine.optimizer = Optimizer()
    observer.adopt(engine, None)
    assert engine.optimizer.step.__func__.__get__(engine.optimizer)(closure=1) == "stepped with 1"
    engine.backward(Loss(2.0))
    engine.optimizer.step()
    first, second = read_trace(session.spec.folder, 0).steps
    assert [(step.losses, step.skipped, step.lr) for step in (first, second)] == [((), True, 0.5), ((2.0,), False, 0.5)]
    assert any("not its engine" in note for note in read_trace(session.spec.folder, 0).notes)
    session.undo()
    assert "step" not in vars(engine.optimizer)


def test_steps_of_the_optimizer_beside_those_of_the_engine_do_not_count(
    session: RankSession, observer: Observer
) -> None:
    engine = make_engine()
    engine.optimizer.step = lambda: None
    observer.adopt(engine, None)
    engine.step()
    engine.optimizer.step()
    assert len(read_trace(session.spec.folder, 0).steps) == 1


def test_second_engine_is_noted_and_not_counted(session: RankSession, observer: Observer) -> None:
    first, second = make_engine(), make_engine()
    assert observer.adopt(first, None)
    assert not observer.adopt(second, None)
    for _ in range(5):
        second.step()
    trace = read_trace(session.spec.folder, 0)
    assert trace.steps == ()
    assert any("more than one engine" in note for note in trace.notes)


def test_losses_of_the_other_engines_are_kept_beside_those_of_the_first(
    session: RankSession, observer: Observer
) -> None:
    first = make_engine()
    second = type(first)()
    observer.adopt(first, None)
    observer.adopt(second, None)
    for loss in (1.0, 2.0):
        first.backward(Loss(loss))
        first.step()
        second.backward(Loss(10 * loss))
        second.step()
    seen = [(step.losses, step.other_losses) for step in read_trace(session.spec.folder, 0).steps]
    assert seen == [((1.0,), ()), ((2.0,), (10.0,))]


def test_the_first_engine_that_trains_takes_the_place_of_one_that_does_not(
    session: RankSession, observer: Observer
) -> None:
    """A reference or reward model is often built first."""
    reference = make_engine()
    actor, critic = type(reference)(), type(reference)()
    chosen = []
    assert observer.adopt(reference, None, chosen=lambda: chosen.append("reference"))
    assert not observer.adopt(actor, None, chosen=lambda: chosen.append("actor"))
    assert not observer.adopt(critic, None, chosen=lambda: chosen.append("critic"))
    reference.forward(1)
    for engine, loss in ((actor, 3.0), (critic, 5.0), (actor, 4.0)):
        engine.backward(Loss(loss))
        engine.step()
    assert chosen == ["actor"]
    seen = [(step.losses, step.other_losses) for step in read_trace(session.spec.folder, 0).steps]
    assert seen == [((3.0,), ()), ((4.0,), (5.0,))]


def test_pipeline_engine_steps_once_a_batch(session: RankSession, observer: Observer) -> None:
    engine = make_engine()
    type(engine).train_batch = lambda this: (this.step(), Loss(7.0))[1]
    observer.adopt(engine, None)
    assert engine.train_batch() == 7.0
    (step,) = read_trace(session.spec.folder, 0).steps
    assert step.losses == (7.0,)


def test_scaler_that_drops_a_step_without_counting_it(session: RankSession, observer: Observer) -> None:
    """torch's GradScaler, where several releases leave `skipped_steps` at 0."""
    engine = make_engine()
    scales = iter((65536.0, 32768.0, 32768.0, 32768.0))
    engine.torch_autocast_z0_gradscaler = SimpleNamespace(get_scale=lambda: next(scales))
    observer.adopt(engine, None)
    engine.step()
    engine.step()
    assert [step.skipped for step in read_trace(session.spec.folder, 0).steps] == [True, False]


def test_inputs_are_cast_before_the_forward(session: RankSession, observer: Observer) -> None:
    engine = make_engine()
    observer.adopt(engine, None, lambda _, args, kwargs: ((args[0] * 10,), kwargs))
    assert engine.forward(2) == 20


def test_undo_leaves_the_class_as_it_was(session: RankSession, observer: Observer) -> None:
    engine = make_engine()
    before = dict(vars(type(engine)))
    observer.adopt(engine, None)
    session.undo()
    assert dict(vars(type(engine))) == before
