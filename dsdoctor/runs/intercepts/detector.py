"""The numerics detector inside a run: attached to the engine, its first hit goes into the trace."""

from __future__ import annotations

from typing import Any

from dsdoctor.runs.session import RankSession


def attach(session: RankSession, engine: Any) -> None:
    """Attach the detector; the run goes on after a hit."""
    from dsdoctor import numerics

    numerics.attach(engine, mode="frames", on_first_bad=session.trace.first_bad)
