"""The controls: in fp32 when the precision is in doubt, and with a suspected key of the config set otherwise."""

from __future__ import annotations

from dataclasses import replace

from dsdoctor.blame.health import judge
from dsdoctor.blame.suspects import Suspect, suspects
from dsdoctor.diagnoses import diagnose
from dsdoctor.dsconfig.patch import apply
from dsdoctor.runs.facts import Run
from dsdoctor.stages.legs import told
from dsdoctor.stages.observe import observe
from dsdoctor.triage import Examination, StageResult

_MOST_PROOFS = 3


def control_fp32(examination: Examination) -> StageResult:
    """The same in fp32, then one run for each suspected key; only where a run went wrong in a way they can explain."""
    given = examination.case.run("with-deepspeed")
    if given is None or not judge(given).failed:
        why = "nothing failed" if given else "no run to control"
        return StageResult(name="control-fp32", status="skipped", why=why)
    control = _in_fp32(examination, given)
    proofs = _proofs(examination)
    lines = [result.why for result in (control,) if result is not None]
    lines += [f"with {' and '.join(run.changed)} changed: {told(run).why}" for run in proofs]
    if not lines:
        return StageResult(name="control-fp32", status="skipped", why="the precision cannot explain this failure")
    status = control.status if control is not None else told(proofs[-1]).status
    return StageResult(
        name="control-fp32", status=status, why="; ".join(lines), details=control.details if control is not None else {}
    )


def _in_fp32(examination: Examination, given: Run) -> StageResult | None:
    """In fp32 without DeepSpeed, or with it where the plain engine cannot play its part."""
    low = given.facts is not None and given.facts.precision != "fp32"
    if not (low and judge(given).numeric):
        return None
    plain = examination.case.run("without-deepspeed")
    if plain is not None and not plain.not_played and not judge(plain).failed:
        return None
    playable = plain is None or not plain.not_played
    run = observe(examination, "control-fp32", engine="plain" if playable else "deepspeed", precision="fp32")
    examination.learn(runs=(*examination.case.runs, run))
    result = told(run)
    return replace(result, why=f"in fp32: {result.why}")


def _proofs(examination: Examination) -> list[Run]:
    """Runs of the given config with one suspect changed, until one passes."""
    made: list[Run] = []
    for number, suspect in enumerate(_open_suspects(examination)[:_MOST_PROOFS], start=1):
        run = _prove(examination, suspect, number)
        made.append(run)
        if not judge(run).failed:
            break
    return made


def _open_suspects(examination: Examination) -> list[Suspect]:
    return suspects(examination.case, diagnose(examination.case).findings)


def _prove(examination: Examination, suspect: Suspect, number: int) -> Run:
    assert examination.case.config is not None
    examination.tell(f"trying the config with only {' and '.join(suspect.keys)} changed")
    run = observe(
        examination,
        "proof",
        engine="deepspeed",
        name=f"proof-{number}",
        config=apply(examination.case.config.data, suspect.patch),
    )
    run = replace(run, changed=suspect.keys)
    examination.learn(runs=(*examination.case.runs, run))
    return run
