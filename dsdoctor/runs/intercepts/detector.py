"""The numerics detector inside a run: attached to the engine, its first hit is examined and goes into the trace.

A run may also be made to run a bundle's batch again, or to plant faults in the model; both need the script only to
build its model, and end the run. What they find is left in files of the run's folder, `NAME-rankN.json`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from dsdoctor.finding import FirstBad
from dsdoctor.runs import rank_process
from dsdoctor.runs.session import RankSession
from dsdoctor.runs.spec import result_path
from dsdoctor.runs.stopping import StopRule


def attach(session: RankSession, engine: Any) -> None:
    """Do what `spec.extra` asks for: `bundle` (a folder), `selftest`, else watch the run.

    `trace_batches` are printed in full, after batch `stop_after_batch` the run ends; `record` keeps the numbers of
    every tensor, to compare runs.
    """
    extra = session.spec.extra
    if "bundle" in extra:
        _run_bundle(session, engine, Path(extra["bundle"]))
    elif extra.get("selftest"):
        _plant_in_first_batch(session, engine)
    else:
        _watch(session, engine, extra)


def _watch(session: RankSession, engine: Any, extra: Mapping[str, Any]) -> None:
    """The run goes on after a hit, whose batch is examined on the spot."""
    from dsdoctor import numerics
    from dsdoctor.numerics.examiner import Examiner

    examiner = Examiner(engine, Path(session.spec.folder), asdict(session.spec))

    def hit(found: FirstBad, report: str, patch: str) -> None:
        examined = examiner.examine(found)
        if found.op is None and examined.derivative is not None:
            found = replace(found, op=examined.derivative[0], line=examined.derivative[1])
        session.trace.first_bad(found, report, examined.cure.patch if examined.cure else patch, examined)

    detector = numerics.attach(
        engine,
        mode="frames",
        on_first_bad=hit,
        trace_batches=tuple(extra.get("trace_batches", ())),
        record=session.spec.folder if extra.get("record") else None,
    )
    examiner.follow(detector)

    def leave() -> None:
        _write(session, "headroom", detector.headroom.to_list())
        _write(session, "underflow", [examiner.underflow.to_dict()] if examiner.underflow is not None else [])

    session.at_undo(leave)
    last = extra.get("stop_after_batch")
    if last is not None:
        _stop_after(session, engine, detector, int(last))


def _stop_after(session: RankSession, engine: Any, detector: Any, last: int) -> None:
    rule = StopRule(session, rank_process.end_after)

    def ended(*_: Any) -> None:
        if detector.clock.batch >= last:
            detector.detach()
            rule.stop("steps")

    engine.module.register_forward_hook(ended)


def _run_bundle(session: RankSession, engine: Any, place: Path) -> None:
    from dsdoctor.numerics.bundle import load
    from dsdoctor.numerics.replaying import run_again

    with session.guard("run the bundle again"):
        found, report, examined = run_again(engine.module, load(place))
        session.trace.first_bad(found, report, examined.cure.patch if examined.cure else "", examined)
    StopRule(session, rank_process.end_after).stop("probe")


def _plant_in_first_batch(session: RankSession, engine: Any) -> None:
    from dsdoctor.numerics.again import Batch
    from dsdoctor.numerics.selftest import selftest

    kept: list[Batch] = []

    def begins(_: Any, args: Any, kwargs: Any) -> None:
        kept[:] = [Batch.now(0, 0, args, kwargs)]

    def ended(*_: Any) -> None:
        for handle in handles:
            handle.remove()
        with session.guard("plant faults"):
            _write(session, "selftest", [row.to_dict() for row in selftest(engine.module, kept[0])])
        StopRule(session, rank_process.end_after).stop("steps")

    handles = [
        engine.module.register_forward_pre_hook(begins, with_kwargs=True),
        engine.module.register_forward_hook(ended),
    ]


def _write(session: RankSession, name: str, values: Any) -> None:
    path = result_path(session.spec.folder, name, session.rank)
    path.write_text(json.dumps(values), encoding="utf-8")
