"""The collectives of the ranks when a run stood still, from what their flight recorders wrote, and compared.

torch's own readers of these dumps expect NCCL's; this one reads both kinds (their format: FlightRecorderDetail.hpp of
torch). Pure but for `read_collectives`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsdoctor.runs.facts import Collective, RankRun
from dsdoctor.runs.spec import collectives_path

_LAST = 20
"""Collectives kept of each rank, the latest."""
_SIZES_MAY_DIFFER = ("all_to_all", "alltoall", "gather", "scatter", "send", "recv")
"""Operations in which each rank may rightly bring tensors of another size (by the beginning of the name)."""


@dataclass(frozen=True, kw_only=True)
class Apart:
    """`waiting` on rank `waits` is not what rank `other` called: that is at `theirs` (None where it called nothing)."""

    waits: int
    waiting: Collective
    other: int
    theirs: Collective | None

    @property
    def differ(self) -> bool:
        """Both called a collective of this number, and not the same one; else `other` has not come so far."""
        return self.theirs is not None and self.theirs.number == self.waiting.number


def read_collectives(folder: str | Path, rank: int) -> tuple[Collective, ...]:
    """The last collectives that a rank called, in their order; empty where it wrote none or nothing that is understood.

    Where gloo and NCCL were used side by side, their order among each other is that of their times.
    """
    try:
        dumps = json.loads(collectives_path(folder, rank).read_bytes())
    except (OSError, ValueError):
        return ()
    return parse(dumps)


def parse(dumps: Any) -> tuple[Collective, ...]:
    """The dumps of one rank, as the recorder gives them in JSON."""
    entries = [entry for dump in dumps if isinstance(dump, dict) for entry in dump.get("entries") or ()]
    entries.sort(key=lambda entry: entry.get("time_created_ns", 0))
    return tuple(_collective(entry) for entry in entries if not entry.get("is_p2p"))[-_LAST:]


def _collective(entry: Mapping[str, Any]) -> Collective:
    """`retired` is set when the work has been waited for; NCCL's watchdog sets the state as well."""
    name = str(entry.get("profiling_name", "")).partition(":")[2] or str(entry.get("profiling_name", ""))
    group = entry.get("process_group") or ("", "")
    return Collective(
        group=str(group[0]),
        group_name=str(group[1]),
        number=int(entry.get("collective_seq_id", 0)),
        operation=name,
        sizes=tuple(tuple(int(n) for n in size) for size in entry.get("input_sizes") or ()),
        dtypes=tuple(str(dtype) for dtype in entry.get("input_dtypes") or ()),
        finished=bool(entry.get("retired")) or entry.get("state") == "completed",
    )


def apart(ranks: Sequence[RankRun]) -> Apart | None:
    """Where the ranks part: a collective that one waits in, and what another one that is in the same group does.

    A different call comes before one that is missing. Ranks that recorded nothing in a group may not belong to it.
    """
    found = list(_pairs(ranks))
    return next((pair for pair in found if pair.differ), None) or next(iter(found), None)


def _pairs(ranks: Sequence[RankRun]) -> Iterator[Apart]:
    for rank in ranks:
        for waiting in rank.collectives:
            if waiting.finished:
                continue
            for other in ranks:
                if other.rank != rank.rank:
                    yield from _pair(rank, waiting, other)


def _pair(rank: RankRun, waiting: Collective, other: RankRun) -> Iterator[Apart]:
    theirs = [call for call in other.collectives if call.group == waiting.group]
    if not theirs:
        return
    same = next((call for call in theirs if call.number == waiting.number), None)
    if same is not None and not _agree(waiting, same):
        yield Apart(waits=rank.rank, waiting=waiting, other=other.rank, theirs=same)
    elif same is None and theirs[-1].number < waiting.number:
        yield Apart(waits=rank.rank, waiting=waiting, other=other.rank, theirs=theirs[-1])


def _agree(one: Collective, other: Collective) -> bool:
    if one.operation != other.operation:
        return False
    return one.operation.lstrip("_").startswith(_SIZES_MAY_DIFFER) or (one.sizes, one.dtypes) == (
        other.sizes,
        other.dtypes,
    )
