"""The control in fp32, when the precision is in doubt."""

from __future__ import annotations

from dataclasses import replace

from dsdoctor.blame.health import judge
from dsdoctor.runs.facts import Run
from dsdoctor.stages.legs import told
from dsdoctor.stages.observe import observe
from dsdoctor.triage import Examination, StageResult


def control_fp32(examination: Examination) -> StageResult:
    """The same in fp32; only where the precision of a run in 16 bits can be what it failed for."""
    given = examination.case.run("with-deepspeed")
    if given is None or not judge(given).failed:
        why = "nothing failed" if given else "no run to control"
        return StageResult(name="control-fp32", status="skipped", why=why)
    return _in_fp32(examination, given) or StageResult(
        name="control-fp32", status="skipped", why="the precision cannot explain this failure"
    )


def _in_fp32(examination: Examination, given: Run) -> StageResult | None:
    """In fp32 without DeepSpeed, or with it where the plain engine cannot play its part."""
    low = given.facts is not None and given.facts.precision != "fp32"
    if not (low and judge(given).of_the_precision):
        return None
    plain = examination.case.run("without-deepspeed")
    if plain is not None and not plain.not_played and not judge(plain).failed:
        return None
    playable = plain is None or not plain.not_played
    run = observe(examination, "control-fp32", engine="plain" if playable else "deepspeed", precision="fp32")
    examination.learn(runs=(*examination.case.runs, run))
    result = told(run)
    return replace(result, why=f"in fp32: {result.why}")
