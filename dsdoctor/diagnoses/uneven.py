"""Ranks with different numbers of batches, as a log shows them."""

from __future__ import annotations

from collections.abc import Mapping

from dsdoctor.logs.facts import LogEvent, LogFacts


def fewest_and_most(logs: LogFacts) -> tuple[LogEvent, LogEvent] | None:
    """The lines of the ranks that said they have the fewest and the most batches; None if all have the same.

    Only what a rank says of itself before the first step counts: later numbers of steps grow as it trains.
    """
    said: dict[int, LogEvent] = {}
    for event in logs.of_kind("rank-batches"):
        if event.rank is not None and event.step is None:
            said.setdefault(event.rank, event)
    if len(said) < 2:
        return None
    fewest = min(said.values(), key=batches)
    most = max(said.values(), key=batches)
    return (fewest, most) if batches(fewest) < batches(most) else None


def batches(event: LogEvent) -> int:
    fields: Mapping[str, str] = event.fields
    return int(next((fields[name] for name in ("batches", "count", "length") if name in fields), 0))
