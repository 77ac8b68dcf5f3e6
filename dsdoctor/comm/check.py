"""The communication check: start real ranks through the user's launcher, and put together what became of each.

Nothing is started where that cannot work: the master's name does not resolve, or the port that the user chose is taken.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dsdoctor.comm.facts import CommFacts, CommRank
from dsdoctor.comm.merge import merge
from dsdoctor.comm.order import order_for, read_records
from dsdoctor.comm.place import port_trouble, resolve
from dsdoctor.comm.speeds import speeds
from dsdoctor.comm.ways import Ways
from dsdoctor.machine import interconnect
from dsdoctor.runs.launcher import LaunchPlan, world_size
from dsdoctor.runs.processes import LAUNCHER_OUTPUT, Completed, run_bounded

RANK_MODULE = "dsdoctor.comm.rank"
_OUTPUT_LINES = 40


def check(
    plan: LaunchPlan,
    *,
    config: Mapping[str, Any],
    folder: Path,
    deadline: float = 30.0,
    timeout: float = 90.0,
    module: str = RANK_MODULE,
) -> CommFacts:
    """Can the ranks of this plan meet, allocate, and exchange right values?

    `config` is the ds_config, for the precision; `deadline` is the limit of one step and `timeout` that of the whole,
    in seconds. `folder` is made and keeps the records of the ranks and what they printed. `module` is what the ranks
    run. Raises LaunchError for a plan that no launcher can carry out, OSError where `folder` cannot be written.
    """
    facts = CommFacts(
        world_size=world_size(plan),
        asked_device=plan.device,
        master_addr=plan.master_addr,
        master_port=plan.master_port,
        resolution=resolve(plan.master_addr),
        deadline=deadline,
    )
    facts = _with_port(facts)
    if (facts.resolution and facts.resolution.error) or facts.port_taken:
        return facts
    folder.mkdir(parents=True, exist_ok=True)
    order = order_for(config, device=plan.device, deadline=deadline, folder=folder.resolve(), ranks=facts.world_size)
    done = run_bounded(plan, module, [str(order.write())], folder=folder, cwd=folder, timeout=timeout)
    return _completed(facts, done, folder)


def _with_port(facts: CommFacts) -> CommFacts:
    """A port that the user chose is tested where rank 0 will listen on it: on this machine."""
    here = facts.resolution is not None and facts.resolution.local
    if facts.master_port is None or not here:
        return facts
    return replace(facts, port_taken=port_trouble(facts.master_port))


def _completed(facts: CommFacts, done: Completed, folder: Path) -> CommFacts:
    records = [read_records(folder, rank) for rank in range(facts.world_size)]
    chosen = next((r for own in records for r in own if r["event"] == "chosen"), {})
    ranks = merge(records, done.ranks)
    ways = Ways(backend=chosen.get("backend", ""), ranks=ranks, gpu_links=_gpu_links(ranks))
    facts = replace(
        facts,
        master_port=done.port,
        device=chosen.get("device", ""),
        backend=chosen.get("backend", ""),
        ranks=ranks,
        speeds=speeds(records, [rank.host for rank in ranks], ways.between),
        seconds=round(done.seconds, 1),
        timed_out=done.timed_out,
    )
    return facts if facts.passed else replace(facts, output=_tail(folder / LAUNCHER_OUTPUT))


def _gpu_links(ranks: Sequence[CommRank]) -> dict[str, interconnect.GpuLinks]:
    """Of this machine, on which all ranks are that we start; not asked where no two have a GPU."""
    hosts = {rank.host for rank in ranks if rank.gpu is not None}
    return {host: interconnect.parse(interconnect.ask()) for host in hosts} if len(ranks) > 1 else {}


def _tail(path: Path) -> str:
    """The last lines that the launcher and the ranks printed."""
    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            return "".join(deque(lines, maxlen=_OUTPUT_LINES))
    except OSError:
        return ""
