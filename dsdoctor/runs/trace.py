"""What a rank process tells the parent: one JSON object a line, written while the run goes on.

`TraceWriter` is used inside the rank, `read_trace` by the parent. The file is internal to one version of dsdoctor, so
it keeps Python's NaN and Infinity tokens. Every event has `event` and `t` (unix seconds); the kinds are

    start       rank, local_rank, world_size, pid, host, versions
    note        text: something that was changed for this run
    process_group  backend, timeout (seconds), world_size, address: torch.distributed is up
    initialize  model (fields of ModelFacts), facts (fields of EngineFacts); again where another engine is watched then
    enter       phase (script, forward, backward, step), step, micro_step: the heartbeat, and where the rank is
    step        fields of Step; loss_scale without next_scale: the step raised before it decided on the scale
    failure     type, message, frames, chain: the exception that ended the script
    first_bad   fields of FirstBad, frames_report, patch, examined (fields of Examined)
    misuse      what: something that the script did against the rules of the engine, before this raised for it
    contained   what, original, replacement: a side effect that went elsewhere (replacement is empty where it was
                blocked)
    stop        reason: "steps" or "probe"
    finish      code: the script ended by itself, with this exit code

No torch in here: the parent imports it.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from dsdoctor.finding import FirstBad
from dsdoctor.numerics.examined import Examined
from dsdoctor.runs.facts import EngineFacts, Failure, Frame, Misuse, ModelFacts, Step
from dsdoctor.runs.spec import trace_path

EnteredPhase = Literal["script", "forward", "backward", "step"]


@dataclass(frozen=True, kw_only=True)
class Contained:
    """A side effect of the script that dsdoctor led elsewhere; `replacement` is empty where it was blocked."""

    what: str
    original: str
    replacement: str


@dataclass(frozen=True, kw_only=True)
class ProcessGroup:
    """The default process group of a rank: `timeout` in seconds, `address` as host:port of its store."""

    backend: str
    timeout: float | None
    world_size: int
    address: str


@dataclass(frozen=True, kw_only=True)
class RankTrace:
    """All that one rank wrote, in the terms of `runs.facts`.

    `started` is False where the rank never came so far as to write its first line. `last_phase`, `last_step` and
    `last_micro_step` say where it was at its last line. `finish_code` is the exit code of a script that ended by
    itself, else None; `stopped` the reason for which dsdoctor ended it.
    """

    rank: int
    started: bool = False
    local_rank: int = 0
    world_size: int = 1
    pid: int | None = None
    host: str = ""
    versions: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()
    process_group: ProcessGroup | None = None
    model: ModelFacts | None = None
    facts: EngineFacts | None = None
    called_engine: bool = False
    last_phase: str = "not started"
    last_step: int = 0
    last_micro_step: int = 0
    steps: tuple[Step, ...] = ()
    failure: Failure | None = None
    first_bad: FirstBad | None = None
    frames_report: str = ""
    patch: str = ""
    examined: Examined | None = None
    contained: tuple[Contained, ...] = ()
    misuse: tuple[Misuse, ...] = ()
    stopped: str | None = None
    finish_code: int | None = None
    finish_time: float | None = None

    @property
    def completed(self) -> bool:
        """The rank did all it was asked to, so that what happens to its process afterwards proves nothing."""
        return self.stopped is not None or (self.finish_code == 0 and self.failure is None)


class TraceWriter:
    """Appends events to the trace of one rank: one unbuffered write a line, and never an exception.

    What cannot be written (disk full, descriptor closed by the script) is lost: the user's run goes before.
    """

    def __init__(self, path: str | Path) -> None:
        self._descriptor = -1
        self._pid = os.getpid()
        with contextlib.suppress(OSError):
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_CLOEXEC", 0)
            self._descriptor = os.open(path, flags, 0o644)

    def write(self, event: str, **values: Any) -> None:
        """Write one event with the time of now; nothing from a process that the rank forked."""
        if os.getpid() != self._pid:
            return
        with contextlib.suppress(Exception):
            line = json.dumps({"event": event, "t": time.time(), **values}, default=repr)
            os.write(self._descriptor, line.encode("utf-8", "backslashreplace") + b"\n")

    def start(self, *, rank: int, local_rank: int, world_size: int, host: str, versions: Mapping[str, str]) -> None:
        self.write(
            "start",
            rank=rank,
            local_rank=local_rank,
            world_size=world_size,
            pid=os.getpid(),
            host=host,
            versions=dict(versions),
        )

    def note(self, text: str) -> None:
        self.write("note", text=text)

    def process_group(self, group: ProcessGroup) -> None:
        self.write("process_group", **asdict(group))

    def initialize(self, model: ModelFacts, facts: EngineFacts) -> None:
        self.write("initialize", model=asdict(model), facts=asdict(facts))

    def enter(self, phase: EnteredPhase, step: int, micro_step: int) -> None:
        self.write("enter", phase=phase, step=step, micro_step=micro_step)

    def step(self, step: Step) -> None:
        self.write("step", **asdict(step))

    def failure(self, failure: Failure) -> None:
        self.write("failure", **_failure_values(failure))

    def first_bad(self, first: FirstBad, frames_report: str, patch: str, examined: Examined) -> None:
        told = examined.to_dict()
        self.write("first_bad", **asdict(first), frames_report=frames_report, patch=patch, examined=told)

    def misuse(self, what: Misuse) -> None:
        self.write("misuse", what=what)

    def contained(self, what: str, original: str, replacement: str = "") -> None:
        self.write("contained", what=what, original=original, replacement=replacement)

    def stop(self, reason: Literal["steps", "probe"]) -> None:
        self.write("stop", reason=reason)

    def finish(self, code: int) -> None:
        self.write("finish", code=code)


def read_trace(folder: str | Path, rank: int) -> RankTrace:
    """The trace of `rank` in a run's folder, also while it is still being written; empty where there is no file.

    Lines that are not whole (the last one of a killed process) or not understood are passed over.
    """
    values: dict[str, Any] = {"rank": rank}
    for event in _events(trace_path(folder, rank)):
        with contextlib.suppress(KeyError, TypeError, ValueError):
            _take(values, rank, event)
    return RankTrace(**values)


def _events(path: Path) -> Iterator[dict[str, Any]]:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        return
    for line in lines:
        with contextlib.suppress(ValueError):
            event = json.loads(line)
            if isinstance(event, dict) and "event" in event and "t" in event:
                yield event


def _take(values: dict[str, Any], rank: int, event: dict[str, Any]) -> None:
    """Fold one event into the fields of a RankTrace."""
    kind = event["event"]
    if kind == "start":
        _take_start(values, event)
    elif kind == "enter":
        values.update(last_phase=event["phase"], last_step=event["step"], last_micro_step=event["micro_step"])
    elif kind == "step":
        step = _only(Step, event) | {name: tuple(event.get(name, ())) for name in ("losses", "other_losses")}
        _append(values, "steps", Step(**step))
    elif kind == "process_group":
        values["process_group"] = ProcessGroup(**_only(ProcessGroup, event))
    elif kind == "initialize":
        values.update(called_engine=True, model=_model(event["model"]), facts=EngineFacts(**event["facts"]))
    elif kind == "failure":
        values["failure"] = _failure(event, rank, float(event["t"]))
    elif kind == "first_bad" and "first_bad" not in values:
        values["first_bad"] = FirstBad(**_only(FirstBad, event))
        values.update(frames_report=event["frames_report"], patch=event["patch"])
        values["examined"] = Examined.from_dict(event["examined"])
    elif kind == "note":
        _append(values, "notes", event["text"])
    elif kind == "misuse":
        _append(values, "misuse", event["what"])
    elif kind == "contained":
        _append(values, "contained", Contained(**_only(Contained, event)))
    elif kind == "stop":
        values.update(stopped=event["reason"], last_phase="stopped")
    elif kind == "finish":
        values.update(finish_code=event["code"], finish_time=float(event["t"]), last_phase="stopped")


def _take_start(values: dict[str, Any], event: dict[str, Any]) -> None:
    values.update({name: event[name] for name in ("local_rank", "world_size", "pid", "host")})
    values.update(
        started=True,
        last_phase="script",
        versions=tuple(sorted(event["versions"].items())),
    )


def _append(values: dict[str, Any], name: str, item: Any) -> None:
    values[name] = (*values.get(name, ()), item)


def _only(kind: type[Any], event: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of an event that are fields of the dataclass `kind`."""
    names = {field.name for field in fields(kind)}
    return {name: value for name, value in event.items() if name in names}


def _model(values: Mapping[str, Any]) -> ModelFacts:
    dtypes = tuple((str(name), int(count)) for name, count in values["dtypes"])
    return ModelFacts(**_only(ModelFacts, values) | {"dtypes": dtypes})


def _failure_values(failure: Failure) -> dict[str, Any]:
    return {
        "type": failure.type,
        "message": failure.message,
        "frames": [asdict(frame) for frame in failure.frames],
        "chain": [_failure_values(link) for link in failure.chain],
        "step": failure.step,
    }


def _failure(values: Mapping[str, Any], rank: int, when: float) -> Failure:
    return Failure(
        rank=rank,
        type=values["type"],
        message=values["message"],
        frames=_frames(values["frames"]),
        step=values.get("step"),
        time=when,
        chain=tuple(_failure(link, rank, when) for link in values["chain"]),
    )


def _frames(values: Iterable[Mapping[str, Any]]) -> tuple[Frame, ...]:
    return tuple(Frame(**{**frame, "loops": tuple(frame.get("loops", ()))}) for frame in values)
