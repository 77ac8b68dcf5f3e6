"""The script with DeepSpeed and without it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dsdoctor.blame.compare import PERSISTS, compare, nondeterministic
from dsdoctor.blame.health import Health, judge
from dsdoctor.diagnoses.standing import standing
from dsdoctor.runs.facts import Run
from dsdoctor.stages.checks import cannot_run, comm_failed, look_at_the_machine
from dsdoctor.stages.observe import observe
from dsdoctor.triage import Examination, StageResult, Status


def with_deepspeed(examination: Examination) -> StageResult:
    """The user's script as it is, the given ds_config in force."""
    if reason := cannot_run(examination) or comm_failed(examination):
        return StageResult(name="with-deepspeed", status="skipped", why=reason)
    run = _failed_before_the_model(examination) or observe(examination, "with-deepspeed", engine="deepspeed")
    examination.learn(runs=(*examination.case.runs, run))
    if examination.job.ask_libraries_late and judge(run).failed:
        look_at_the_machine(examination, libraries=True)
    return told(run)


def without_deepspeed(examination: Examination) -> StageResult:
    """The same script, DeepSpeed's part played by plain PyTorch."""
    if reason := cannot_run(examination) or comm_failed(examination) or _nothing_to_compare(examination):
        return StageResult(name="without-deepspeed", status="skipped", why=reason)
    run = observe(examination, "without-deepspeed", engine="plain")
    examination.learn(runs=(*examination.case.runs, run))
    if run.not_played:
        return StageResult(name="without-deepspeed", status="skipped", why=run.not_played, details=summary(run))
    _repeat_if_they_differ(examination, run)
    return told(run, _compared(examination, run))


def _repeat_if_they_differ(examination: Examination, plain: Run) -> None:
    """Where the numbers of the two runs differ, the plain one again: a script that disagrees with itself proves little.

    An exception that only one of them raises needs no second look.
    """
    given = examination.case.run("with-deepspeed")
    if given is None or judge(plain).failed or plain.outcome == "interrupted":
        return
    health, apart = judge(given), compare(given, plain).apart_from
    if not health.numeric and (health.failed or apart is None):
        return
    examination.tell(
        "the numbers of the two runs differ: once more without DeepSpeed, to see whether it repeats itself"
    )
    parted = health.step if health.numeric else apart
    steps = min(examination.job.steps, (parted or 0) + 2 * PERSISTS)
    again = observe(examination, "repeat", engine="plain", steps=steps)
    examination.learn(runs=(*examination.case.runs, again))


def told(run: Run, comparison: str = "") -> StageResult:
    """The stage's result for a run: its judgement, the losses, what was changed for it."""
    health = judge(run)
    losses = [f"{rank.steps[-1].losses[-1]:.4g}" for rank in run.ranks[:1] if rank.steps and rank.steps[-1].losses]
    passed = f"{run.steps_made} steps, last loss {losses[0]}" if losses else f"{run.steps_made} steps"
    skipped = sum(step.skipped for step in run.ranks[0].steps) if run.ranks else 0
    if skipped:
        passed += f", {skipped} skipped"
    why = health.why or run.why or passed + comparison
    return StageResult(name=run.leg, status=_status(health, run), why=why, details=summary(run))


def summary(run: Run) -> dict[str, Any]:
    """What the JSON document keeps of a run: everything but the long curves and texts."""
    return {
        "outcome": run.outcome,
        "engine": run.engine,
        "seconds": run.seconds,
        "world_size": run.world_size,
        "folder": run.folder,
        "notes": list(run.notes),
        "written_in_working_directory": list(run.written),
        "ranks": [_rank(run, index) for index in range(len(run.ranks))],
        **_host_memory(run),
    }


def _host_memory(run: Run) -> dict[str, Any]:
    """The curve of the host's memory, where it may have been the reason of the end."""
    if run.outcome not in ("killed", "out-of-memory"):
        return {}
    curve = [[round(s.seconds, 2), s.ranks_bytes, s.available_bytes] for s in run.memory]
    return {"host_memory": curve, "host_memory_columns": ["seconds", "ranks_bytes", "available_bytes"]}


def _rank(run: Run, index: int) -> dict[str, Any]:
    rank = run.ranks[index]
    return {
        "rank": rank.rank,
        "exit_code": rank.exit_code,
        "completed": rank.completed,
        "last_phase": rank.last_phase,
        "steps": [
            [step.index, step.losses[-1] if step.losses else None, step.grad_norm, step.loss_scale, step.skipped]
            for step in rank.steps
        ],
        "step_columns": ["step", "loss", "grad_norm", "loss_scale", "skipped"],
    }


def _status(health: Health, run: Run) -> Status:
    if run.outcome in ("timeout", "interrupted"):
        return "timeout" if run.ranks else "crashed"
    if health.failed:
        return "failed"
    return "passed" if run.steps_made else "warned"


def _failed_before_the_model(examination: Examination) -> Run | None:
    """The probe is this very run up to the model; where it failed before, the run would be the same again."""
    probe = examination.case.run("probe")
    if probe is None or probe.model is not None or not judge(probe).failed:
        return None
    return replace(probe, leg="with-deepspeed")


def _nothing_to_compare(examination: Examination) -> str:
    """Why the plain run could not tell more, empty where it can."""
    given = examination.case.run("with-deepspeed")
    if given is None:
        return ""
    unfinished = given.outcome == "timeout" and standing(examination.case) is None
    if (unfinished or not judge(given).failed) and not any(rank.called_engine for rank in given.ranks):
        return "the script never handed a model to DeepSpeed, so both runs are the same"
    config = examination.result("config")
    refused = given.outcome == "raised" and not given.steps_made
    if config is not None and config.status == "failed" and refused:
        return "the ds_config itself stops DeepSpeed; mend it first"
    return ""


def _compared(examination: Examination, plain: Run) -> str:
    given = examination.case.run("with-deepspeed")
    if given is None:
        return ""
    comparison = compare(given, plain)
    if comparison.steps == 0:
        return ""
    apart = f"{comparison.largest_difference:.1%}"
    text = f"; losses within {apart} of the run with DeepSpeed over {comparison.steps} steps"
    if nondeterministic(examination.case):
        return f"{text}, but a second run without DeepSpeed had other losses still"
    return text + (", more than rounding explains" if comparison.apart_from is not None else "")
