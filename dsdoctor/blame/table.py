"""The legs side by side: with DeepSpeed and without it, in the config's precision and in fp32, and their outcomes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePath

from dsdoctor.blame.compare import diverged
from dsdoctor.blame.health import Health, judge
from dsdoctor.blame.signature import own_failures
from dsdoctor.case import Case
from dsdoctor.frames import users_line
from dsdoctor.runs.facts import Run


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One leg. `outcome` is ok, exception, killed, hung, non-finite, diverged, … or not run; `text` says more."""

    engine: str
    precision: str
    outcome: str
    text: str
    step: int | None = None


def table(case: Case) -> tuple[Cell, ...]:
    """All four legs; what was not run says so. Empty where the script was not run at all."""
    given = case.run("with-deepspeed")
    if given is None:
        return ()
    precision = given.facts.precision if given.facts is not None else "as configured"
    cells = {("with DeepSpeed", precision): _cell("with DeepSpeed", precision, given, diverged(case))}
    if (plain := case.run("without-deepspeed")) is not None:
        cells["without DeepSpeed", precision] = _cell("without DeepSpeed", precision, plain)
    if (control := case.run("control-fp32")) is not None:
        engine = "without DeepSpeed" if control.engine == "plain" else "with DeepSpeed"
        cells[engine, "fp32"] = _cell(engine, "fp32", control)
    places = [(e, p) for p in dict.fromkeys((precision, "fp32")) for e in ("with DeepSpeed", "without DeepSpeed")]
    return tuple(cells.get(place) or _not_run(*place) for place in places)


def _not_run(engine: str, precision: str) -> Cell:
    return Cell(engine=engine, precision=precision, outcome="not run", text="not run")


def _cell(engine: str, precision: str, run: Run, moved: Health | None = None) -> Cell:
    if run.not_played:
        return Cell(engine=engine, precision=precision, outcome="not played", text=f"not played: {run.not_played}")
    health = moved or judge(run)
    outcome, text = _words(run, health)
    return Cell(engine=engine, precision=precision, outcome=outcome, text=text, step=health.step)


def _words(run: Run, health: Health) -> tuple[str, str]:
    steps = run.steps_made
    if health.trouble is None:
        return ("ok", f"ok, {steps} steps") if steps else ("no steps", run.why or "no optimizer step")
    if health.trouble == "raised":
        return "exception", _exception(run)
    at = "" if health.step is None else f" in step {health.step}"
    return health.trouble, f"{health.trouble}{at}"


def _exception(run: Run) -> str:
    """Its type, and the line of the user's own code that it came through."""
    first = own_failures(run)[0]
    line = users_line(first.frames)
    return first.type + (f" at {PurePath(line.file).name}:{line.line}" if line is not None else "")
