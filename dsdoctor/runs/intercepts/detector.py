"""The numerics detector inside a run: attached to the engine, its first hit goes into the trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dsdoctor.finding import FirstBad
from dsdoctor.runs.session import RankSession


def attach(session: RankSession, engine: Any) -> None:
    """Attach the detector; the run goes on after a hit, whose batch is examined on the spot."""
    from dsdoctor import numerics
    from dsdoctor.numerics.examiner import Examiner

    examiner = Examiner(engine, Path(session.spec.folder))

    def hit(found: FirstBad, report: str, patch: str) -> None:
        examined = examiner.examine(found)
        session.trace.first_bad(found, report, examined.cure.patch if examined.cure else patch, examined)

    examiner.follow(numerics.attach(engine, mode="frames", on_first_bad=hit))
