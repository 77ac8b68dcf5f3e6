"""The failing run again with the detector on the engine's module: the first non-finite value, named."""

from __future__ import annotations

from dsdoctor.blame.health import judge
from dsdoctor.runs.facts import Run
from dsdoctor.stages.legs import summary
from dsdoctor.stages.observe import observe
from dsdoctor.triage import Examination, StageResult

_STEPS_AFTER = 2
"""Steps run past the bad one, so that what follows from a value can confirm it."""


def numerics(examination: Examination) -> StageResult:
    """Only where a loss, a gradient or the loss scale went bad."""
    failing = _failing(examination)
    if failing is None:
        return StageResult(name="numerics", status="skipped", why="no loss, gradient or loss scale went bad")
    step = judge(failing).step or 0
    run = observe(
        examination,
        "numerics",
        engine=failing.engine,
        detector=True,
        steps=step + 1 + _STEPS_AFTER,
    )
    examination.learn(runs=(*examination.case.runs, run))
    bad = run.first_bad
    if bad is None:
        why = "the detector saw no non-finite value before the run ended"
        return StageResult(name="numerics", status="warned", why=why, details=summary(run))
    place = bad.module or "the model itself"
    op = f", {bad.op}" if bad.op else ""
    why = f"first {bad.kind}: {bad.phase} of {place} ({bad.tensor}{op}), step {bad.step}, rank {bad.rank}"
    seen = next(rank for rank in run.ranks if rank.first_bad == bad)
    details = {**summary(run), "frames": seen.frames_report, "patch": seen.patch}
    return StageResult(name="numerics", status="failed", why=why, details=details)


def _failing(examination: Examination) -> Run | None:
    legs = (examination.case.run(leg) for leg in ("with-deepspeed", "without-deepspeed"))
    return next((run for run in legs if run is not None and judge(run).numeric), None)
