"""The failing run again with the detector on the engine's module: the first non-finite value, named.

For `dsdoctor nan` it runs also where nothing failed, and two more things: a bundle's batch, and the planting of faults.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dsdoctor.blame.health import judge
from dsdoctor.finding import FirstBad
from dsdoctor.job import NumericsOrder
from dsdoctor.numerics.headroom import ModulePeaks, from_list
from dsdoctor.numerics.numbers import files_in
from dsdoctor.numerics.underflow import Underflow
from dsdoctor.runs.facts import Run
from dsdoctor.runs.spec import result_path
from dsdoctor.stages.legs import summary
from dsdoctor.stages.observe import observe
from dsdoctor.triage import Examination, StageResult, Status

_STEPS_AFTER = 2
"""Steps run past the bad one, so that what follows from a value can confirm it."""
_STAGE_3 = 3


def numerics(examination: Examination) -> StageResult:
    """Where a loss, a gradient or the loss scale went bad, or where the user asks for it."""
    order = examination.job.numerics
    if order is not None and order.bundle is not None:
        return _bundle(examination, order)
    if order is not None and order.selftest:
        return _selftest(examination, order)
    return _first_bad(examination, order)


def _first_bad(examination: Examination, order: NumericsOrder | None) -> StageResult:
    failing = _failing(examination)
    given = examination.case.run("with-deepspeed")
    if failing is None and (order is None or given is None or judge(given).failed):
        return StageResult(name="numerics", status="skipped", why="no loss, gradient or loss scale went bad")
    steps = examination.job.steps if failing is None else (judge(failing).step or 0) + 1 + _STEPS_AFTER
    run = observe(
        examination,
        "numerics",
        engine=failing.engine if failing is not None else "deepspeed",
        detector=True,
        steps=steps,
        extra=order.extra() if order is not None else None,
    )
    peaks = from_list(_left(run, "headroom"))
    if order is not None:
        run = _examined_whole(examination, run, steps)
    underflow = next((Underflow.from_dict(one) for one in _left(run, "underflow")), None)
    examination.learn(runs=(*examination.case.runs, run), headroom=peaks, underflow=underflow)
    if run.first_bad is None:
        why = "the detector saw no non-finite value" + (" before the run ended" if failing is not None else "")
        least = _least_headroom(peaks)
        status: Status = "warned" if failing is not None else "passed"
        return StageResult(name="numerics", status=status, why=why + least, details=_details(run, order))
    return _found(run, order)


def _examined_whole(examination: Examination, run: Run, steps: int) -> Run:
    """Where partitioned weights kept the batch from running again: once more without partitioning, if that fits.

    What is learnt there is taken over if the same value is seen at the same place.
    """
    bad, known = run.first_bad, run.examined
    if bad is None or known is None or not known.partitioned:
        return run
    examination.tell("the weights are partitioned: once more without ZeRO-3, to try remedies on the batch")
    given = examination.case.config.data if examination.case.config is not None else {}
    again = observe(
        examination,
        "numerics",
        engine=run.engine,
        name="numerics-whole",
        config=unpartitioned(given),
        detector=True,
        steps=steps,
    )
    seen = next((rank for rank in again.ranks if rank.first_bad is not None and _same(rank.first_bad, bad)), None)
    if seen is None or seen.examined is None:
        return run
    learnt, patch = seen.examined, seen.patch
    return replace(
        run,
        ranks=tuple(
            replace(rank, examined=learnt, patch=patch or rank.patch) if rank.first_bad == bad else rank
            for rank in run.ranks
        ),
    )


def _same(one: FirstBad, other: FirstBad) -> bool:
    """The same value at the same place, in runs whose rounding may differ."""
    return (one.rank, one.step, one.phase, one.module) == (other.rank, other.step, other.phase, other.module)


def _found(run: Run, order: NumericsOrder | None) -> StageResult:
    bad = run.first_bad
    assert bad is not None
    place = bad.module or "the model itself"
    op = f", {bad.op}" if bad.op else ""
    why = f"first {bad.kind}: {bad.phase} of {place} ({bad.tensor}{op}), step {bad.step}, rank {bad.rank}"
    return StageResult(name="numerics", status="failed", why=why, details=_details(run, order))


def _details(run: Run, order: NumericsOrder | None) -> dict[str, Any]:
    seen = next((rank for rank in run.ranks if run.first_bad is not None and rank.first_bad == run.first_bad), None)
    details = summary(run)
    if seen is not None:
        details |= {"frames": seen.frames_report, "patch": seen.patch}
        details |= {"examined": seen.examined.to_dict()} if seen.examined is not None else {}
    if order is not None and order.trace_batches:
        details["trace"] = str(Path(run.folder) / "stderr-rank0.txt")
    if order is not None and files_in(Path(run.folder)):
        details["numbers"] = run.folder
    return details


def _bundle(examination: Examination, order: NumericsOrder) -> StageResult:
    """The bundle's batch on one rank, without partitioning."""
    run = _on_whole_weights(examination, order)
    bad = run.first_bad
    if bad is None:
        why = next((note for note in run.notes if "run the bundle again" in note), run.why or "nothing was run again")
        return StageResult(name="numerics", status="crashed", why=why, details=_details(run, order))
    if bad.cause == "not-reproducible":
        return StageResult(name="numerics", status="warned", why=bad.detail, details=_details(run, order))
    return _found(run, order)


def _selftest(examination: Examination, order: NumericsOrder) -> StageResult:
    """Each planted fault is found, or not."""
    run = _on_whole_weights(examination, order)
    rows = _left(run, "selftest")
    details = {**summary(run), "selftest": rows}
    if not rows:
        why = next((note for note in run.notes if "plant faults" in note), run.why or "the script ran no forward")
        return StageResult(name="numerics", status="crashed", why=why, details=details)
    planted = [row for row in rows if row["right"] is not None]
    right = sum(bool(row["right"]) for row in planted)
    status: Status = "passed" if right == len(planted) else "failed"
    return StageResult(
        name="numerics", status=status, why=f"{right} of {len(planted)} as they should be", details=details
    )


def _on_whole_weights(examination: Examination, order: NumericsOrder) -> Run:
    """A run that ends with the first batch, with the weights of every module whole on the rank."""
    given = examination.case.config.data if examination.case.config is not None else {}
    run = observe(
        examination,
        "numerics",
        engine="deepspeed",
        detector=True,
        config=whole(given, ranks=examination.job.nproc or 1),
        steps=1,
        extra=order.extra(),
    )
    examination.learn(runs=(*examination.case.runs, run))
    return run


def whole(config: Mapping[str, Any], *, ranks: int) -> dict[str, Any]:
    """The config without partitioned weights, and with a batch size that fits another number of ranks."""
    changed = unpartitioned(config)
    if "train_micro_batch_size_per_gpu" in changed:
        changed.pop("train_batch_size", None)
    elif isinstance(changed.get("train_batch_size"), int):
        accumulation = changed.get("gradient_accumulation_steps", 1)
        changed["train_batch_size"] = ranks * (accumulation if isinstance(accumulation, int) else 1)
    return changed


def unpartitioned(config: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the config in which no weight is partitioned."""
    changed = copy.deepcopy(dict(config))
    zero = changed.get("zero_optimization")
    if isinstance(zero, dict) and zero.get("stage") == _STAGE_3:
        changed["zero_optimization"] = {"stage": 0}
    return changed


def _left(run: Run, name: str) -> list[Any]:
    """What the first rank that left a result of this name wrote."""
    for rank in run.ranks:
        path = result_path(run.folder, name, rank.rank)
        try:
            return list(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError):
            continue
    return []


def _least_headroom(peaks: tuple[ModulePeaks, ...]) -> str:
    nearest = min(peaks, key=lambda one: one.octaves, default=None)
    if nearest is None:
        return ""
    return f"; least headroom: {nearest.octaves:.1f} octaves of {nearest.dtype} in {nearest.module or 'the model'}"


def _failing(examination: Examination) -> Run | None:
    legs = (examination.case.run(leg) for leg in ("with-deepspeed", "without-deepspeed"))
    return next((run for run in legs if run is not None and judge(run).numeric), None)
