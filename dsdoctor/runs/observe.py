"""Watch an engine from outside: where it is, and what each attempted optimizer step did.

The methods of the engine's classes are wrapped; they are called with the same arguments and their results are handed
on untouched, so the numbers do not change. Values that live on the device are read only after `step`, where the
engine has synchronised itself. DeepSpeed's engines and the plain stand-in are observed alike.

Runs in rank processes only; torch is imported by the script before.
"""

from __future__ import annotations

import functools
import math
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from dsdoctor.runs import engine_state
from dsdoctor.runs.direct_backward import DirectBackward
from dsdoctor.runs.facts import EngineFacts, Step
from dsdoctor.runs.session import RankSession
from dsdoctor.runs.stopping import StopRule
from dsdoctor.runs.trace import EnteredPhase

CastInputs = Callable[[Any, tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]


class _Candidate(NamedTuple):
    """An engine that may be watched, with the arguments of `Observer.adopt`."""

    engine: Any
    facts: EngineFacts | None
    cast_inputs: CastInputs | None
    chosen: Callable[[], None]


class Observer:
    """Observes one engine of a run: its steps are the steps of the run. Of others only the losses are kept.

    It is the first one that was built, until another one is the first to run a backward pass: reference and reward
    models are often built before what is trained.
    """

    def __init__(self, session: RankSession, rule: StopRule) -> None:
        self._session = session
        self._rule = rule
        self._engine: Any = None
        self._facts: EngineFacts | None = None
        self._cast_inputs: CastInputs | None = None
        self._inside = False
        self._step = 0
        self._micro_step = 0
        self._micro_step_over = False
        self._losses: list[Any] = []
        self._other_losses: list[Any] = []
        self._wrapped: set[type] = set()
        self._others: list[_Candidate] = []
        self._backward_began = self._trained = False
        self._steps_engine = False
        self._since = time.monotonic()

    @property
    def watching(self) -> bool:
        return self._engine is not None

    def adopt(
        self,
        engine: Any,
        facts: EngineFacts | None,
        cast_inputs: CastInputs | None = None,
        chosen: Callable[[], None] = lambda: None,
    ) -> bool:
        """Watch this engine; False where another one is watched already.

        `cast_inputs(engine, args, kwargs)` prepares the inputs of `forward` in runs whose precision we changed.
        `chosen` is called if the engine takes the place of the first one later.
        """
        candidate = _Candidate(engine, facts, cast_inputs, chosen)
        for kind in type(engine).__mro__:
            if "is_gradient_accumulation_boundary" in vars(kind) or "train_batch" in vars(kind):
                self._wrap_class(kind)
        if self._engine is not None:
            self._session.note("the script builds more than one engine: the steps of the first that trains are counted")
            self._others.append(candidate)
            return False
        self._watch(candidate)
        return True

    def _watch(self, candidate: _Candidate) -> None:
        engine, self._facts, self._cast_inputs, _ = candidate
        self._engine = engine
        self._session.step = 0
        self._since = time.monotonic()
        with self._session.guard("watch the optimizer"):
            self._wrap_optimizer(engine.optimizer)
        with self._session.guard("watch backward passes of the script's own"):
            DirectBackward(self._session, engine, began=self._gradient_came, ended=self._direct_backward_ended).attach()

    def _takes_over(self, engine: Any, handler: Callable[..., Any]) -> bool:
        """Watch another engine from now on, if it is the first of all that trains."""
        candidate = next((one for one in self._others if one.engine is engine), None)
        if candidate is None or self._trained or handler not in (self._backward, self._train_batch):
            return False
        self._watch(candidate)
        with self._session.guard("observe another engine"):
            candidate.chosen()
        return True

    def _wrap_class(self, kind: type) -> None:
        if kind in self._wrapped:
            return
        self._wrapped.add(kind)
        around: dict[str, Callable[..., Any]] = {
            "forward": self._forward,
            "backward": self._backward,
            "step": self._engine_step,
            "train_batch": self._train_batch,
        }
        for name, handler in around.items():
            original = vars(kind).get(name)
            if callable(original):
                self._session.patch(kind, name, self._wrapper(original, handler))

    def _wrap_optimizer(self, optimizer: Any) -> None:
        """Watch the steps of this one object. The wrapper is a method, as schedules want one to wrap themselves."""
        original = getattr(optimizer, "step", None)
        if original is None:
            return

        @functools.wraps(original)
        def step(_: Any, *args: Any, **kwargs: Any) -> Any:
            if self._inside or self._steps_engine:
                return original(*args, **kwargs)
            self._session.note("the script steps DeepSpeed's optimizer, not its engine")
            self._rule.again()
            return self._attempt(lambda: original(*args, **kwargs))

        self._session.patch(optimizer, "step", types.MethodType(step, optimizer))

    def _wrapper(self, original: Callable[..., Any], handler: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def method(engine: Any, *args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return original(engine, *args, **kwargs)
            if engine is not self._engine and not self._takes_over(engine, handler):
                if handler == self._backward:
                    self._keep_loss(self._other_losses, args, kwargs)
                return original(engine, *args, **kwargs)
            self._rule.again()
            return handler(functools.partial(original, engine), *args, **kwargs)

        return method

    @contextmanager
    def _in(self, phase: EnteredPhase) -> Iterator[None]:
        """Mark the outermost call into the engine; a call that raises leaves the rank where it was."""
        self._session.trace.enter(phase, self._step, self._micro_step)
        self._inside = True
        try:
            yield
        finally:
            self._inside = False

    def _enter_micro_step(self) -> None:
        """Count a micro-step when the next one begins, so that `step` still belongs to the last one."""
        if self._micro_step_over:
            self._micro_step += 1
            self._micro_step_over = False

    def _back_in_script(self) -> None:
        self._session.trace.enter("script", self._step, self._micro_step)

    def _forward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._enter_micro_step()
        if self._cast_inputs is not None:
            args, kwargs = self._cast_inputs(self._engine, args, kwargs)
        with self._in("forward"):
            result = original(*args, **kwargs)
        self._back_in_script()
        return result

    def _backward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._enter_micro_step()
        self._backward_began = self._trained = True
        self._keep_loss(self._losses, args, kwargs)
        with self._in("backward"):
            result = original(*args, **kwargs)
        self._micro_step_over = True
        self._back_in_script()
        return result

    def _keep_loss(self, where: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with self._session.guard("keep the loss"):
            loss = args[0] if args else kwargs["loss"]
            where.append(loss.detach().clone())

    def _gradient_came(self) -> None:
        """A backward pass has come to the engine, from `engine.backward` or from one that the script started."""
        self._backward_began = self._trained = True
        if not self._inside:
            self._enter_micro_step()
            self._session.trace.enter("backward", self._step, self._micro_step)

    def _direct_backward_ended(self, loss: Any) -> None:
        if self._inside:
            return
        if loss is not None:
            self._losses.append(loss)
        self._micro_step_over = True
        self._back_in_script()

    def _engine_step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._steps_engine = True
        if not self._engine.is_gradient_accumulation_boundary() and not engine_state.owns_boundary(self._engine):
            with self._in("step"):
                result = original(*args, **kwargs)
            self._micro_step_over = True
            self._back_in_script()
            return result
        return self._attempt(lambda: original(*args, **kwargs))

    def _train_batch(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A pipeline engine does a whole optimizer step, with all its micro-batches, in one call."""
        self._steps_engine = True

        def call() -> Any:
            self._backward_began = self._trained = True
            result = original(*args, **kwargs)
            with self._session.guard("keep the loss"):
                self._losses = [result.detach().clone()]
            return result

        return self._attempt(call)

    def _attempt(self, call: Callable[[], Any]) -> Any:
        """One attempted optimizer step: read the engine before and after it, trace it, and stop where it was enough."""
        before = engine_state.read(self._engine)
        try:
            with self._in("step"):
                result = call()
        except BaseException:
            with self._session.guard("trace a step that raised"):
                if not self._backward_began:
                    self._session.trace.misuse("step-before-backward")
                self._session.trace.step(self._step_that_raised(before))
            raise
        step = self._step_that_returned(before)
        self._session.trace.step(step)
        self._begin_step(step.index + 1)
        self._back_in_script()
        self._rule.after_step(step, self._facts)
        return result

    def _step_that_raised(self, before: engine_state.State) -> Step:
        """`next_scale` stays None: there was no decision on it."""
        return Step(
            index=self._step,
            losses=engine_state.numbers(self._losses),
            loss_scale=before.loss_scale,
            lr=before.lr,
            seconds=time.monotonic() - self._since,
        )

    def _step_that_returned(self, before: engine_state.State) -> Step:
        after = engine_state.read(self._engine)
        skipped = engine_state.was_skipped(before, after)
        if not self._steps_engine:  # which counts what is skipped
            skipped = skipped or bool(getattr(self._engine.optimizer, "overflow", False))
        norm = after.grad_norm
        if skipped and norm is not None and math.isfinite(norm):
            norm = None  # of an earlier step, or a stand-in: the gradients of a skipped step have no finite norm
        return Step(
            index=self._step,
            losses=engine_state.numbers(self._losses),
            other_losses=engine_state.numbers(self._other_losses),
            grad_norm=norm,
            loss_scale=before.loss_scale,
            next_scale=after.loss_scale,
            skipped=skipped,
            lr=before.lr,
            seconds=time.monotonic() - self._since,
            host_bytes=engine_state.resident_bytes(),
            device_bytes=engine_state.device_bytes(),
        )

    def _begin_step(self, index: int) -> None:
        self._step = self._session.step = index
        self._micro_step = 0
        self._micro_step_over = False
        self._losses, self._other_losses = [], []
        self._since = time.monotonic()
