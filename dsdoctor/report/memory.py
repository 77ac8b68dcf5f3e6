"""The memory model in a terminal: where the bytes go, the timeline, the bars against the limits, and the ladder."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

from dsdoctor.memory.facts import DeviceNeed, MemoryFacts, Moment, Need
from dsdoctor.memory.ladder import HEADROOM
from dsdoctor.units import size

BAR = 40
"""Columns of a bar."""
_PLACES: tuple[tuple[Literal["gpu", "host", "nvme"], str], ...] = (
    ("gpu", "each GPU"),
    ("host", "each host"),
    ("nvme", "each host's NVMe"),
)


class Line(NamedTuple):
    text: str
    style: str = ""


def lines(facts: MemoryFacts, understood: Mapping[str, str], *, blocks: bool = True) -> Iterator[Line]:
    """The report line by line. `understood` are sizes as they were given and as they were read."""
    yield from _head(facts, understood)
    yield from _terms(facts)
    need = facts.current
    if need is not None:
        yield from _timeline(facts, need, blocks)
        yield from _limits(facts, need, blocks)
    yield from _ladder(facts)
    yield from _advice(facts)
    yield Line("\nassumed:", "dim")
    for text in facts.assumptions:
        yield Line(f"  {text}", "dim")


def _head(facts: MemoryFacts, understood: Mapping[str, str]) -> Iterator[Line]:
    trained = "all trained" if facts.trainable == facts.parameters else f"{facts.trainable:,} of them trained"
    yield Line(f"{facts.model}: {facts.parameters:,} parameters, {trained}", "bold")
    hosts = facts.ranks // facts.ranks_per_host
    where = "GPUs" if facts.device == "cuda" else "ranks on the CPU (no GPU here; --gpu 8x80GiB describes some)"
    yield Line(f"{facts.ranks} {where}, {hosts} host(s)")
    for given, read in understood.items():
        yield Line(f"{given} was read as {read}", "dim")


def _terms(facts: MemoryFacts) -> Iterator[Line]:
    for place, title in _PLACES:
        terms = [one for one in facts.terms if one.place == place]
        if terms:
            yield Line(f"\nwhat {'each rank' if place == 'gpu' and facts.device == 'cpu' else title} holds:", "bold")
        for one in terms:
            note = f"  {one.note}" if one.note else ""
            yield Line(f"  {one.name:<24} {size(one.bytes):>12}  {one.basis:<9}{note}")


def _timeline(facts: MemoryFacts, need: Need, blocks: bool) -> Iterator[Line]:
    places: list[tuple[str, DeviceNeed, int | None]] = [("each host", need.per_host, facts.host_bytes)]
    if facts.device == "cuda":
        places.insert(0, ("each GPU", need.per_gpu, facts.gpu_bytes))
    for title, place, limit in places:
        yield Line(f"\n{title} over time:", "bold")
        full = max(place.peak, limit or 0, 1)
        for one in place.moments:
            mark = "  <- highest" if one.name == place.peak_moment else ""
            yield Line(f"  {one.name:<21} {size(one.holding.total):>12} {_bar(one, full, blocks)}{mark}")


def _bar(moment: Moment, full: int, blocks: bool) -> str:
    return _filled(moment.holding.total / full, blocks)


def _filled(share: float, blocks: bool) -> str:
    filled = round(min(1.0, share) * BAR)
    done, left = ("█", "░") if blocks else ("#", ".")
    return done * filled + left * (BAR - filled)


def _limits(facts: MemoryFacts, need: Need, blocks: bool) -> Iterator[Line]:
    yield Line("\nagainst what there is:", "bold")
    if facts.device == "cuda":
        yield _limit("GPU", need.per_gpu, facts.gpu_bytes, blocks)
    yield _limit("host", need.per_host, facts.host_bytes, blocks)
    if need.per_nvme:
        yield _room("NVMe", need.per_nvme, facts.nvme_bytes, blocks, "")
    checkpoint = facts.checkpoint
    if checkpoint is not None:
        kept = f", {checkpoint.kept} kept" if checkpoint.kept > 1 else ""
        name = f" {checkpoint.folder}" if checkpoint.folder else ""
        yield _room("disk", checkpoint.needed, checkpoint.free, blocks, f" for checkpoints{name}{kept}")


def _limit(name: str, need: DeviceNeed, have: int | None, blocks: bool) -> Line:
    return _room(name, need.peak, have, blocks, f" at {need.peak_moment}")


def _room(name: str, needed: int, have: int | None, blocks: bool, when: str) -> Line:
    if have is None:
        return Line(f"  ?  {name:<5} {size(needed)}{when}; what is free there is not known")
    margin = 1 - needed / max(have, 1)
    mark, style = ("✓", "green") if margin >= HEADROOM else ("!", "yellow") if margin >= 0 else ("✗", "red")
    told = f"{margin:.0%} free" if margin >= 0 else f"{size(needed - have)} too much"
    bar = _filled(needed / max(have, 1), blocks)
    return Line(f"  {mark}  {name:<5} {bar} {size(needed)} of {size(have)}{when}, {told}", style)


def _ladder(facts: MemoryFacts) -> Iterator[Line]:
    yield Line("\nrows, the fastest first (network, PCIe and disk: of a rank and step; the time is assumed):", "bold")
    head = f"{'stage':<6}{'precision':<10}{'optimizer':<10}{'params':<8}{'GPU':>11}{'host':>12}{'NVMe':>11}"
    yield Line(f"     {head}{'network':>12}{'PCIe':>11}{'disk':>11}  slower")
    for index, need in enumerate(facts.needs):
        yield _row(need, chosen=index == facts.recommended)


def _row(need: Need, *, chosen: bool) -> Line:
    mark = {True: "✓", False: "✗", None: "?"}[need.fits]
    place = f"{need.stage:<6}{need.precision:<10}{need.offload_optimizer:<10}{need.offload_param:<8}"
    sizes = f"{size(need.per_gpu.peak):>11}{size(need.per_host.peak):>12}{_moved(need.per_nvme):>11}"
    traffic = ""
    if need.cost is not None:
        moved = (need.cost.network, need.cost.pcie, need.cost.disk)
        traffic = f"{_moved(moved[0]):>12}{_moved(moved[1]):>11}{_moved(moved[2]):>11}  x{need.cost.slowdown:.2f}"
    notes = [*(["given"] if need.current else []), *(["recommended"] if chosen else [])]
    style = "green" if chosen else "bold" if need.current else "" if need.fits is not False else "dim"
    return Line(f"  {mark}  {place}{sizes}{traffic}  {', '.join(notes)}".rstrip(), style)


def _moved(count: int) -> str:
    return size(count) if count else "-"


def _advice(facts: MemoryFacts) -> Iterator[Line]:
    yield Line("")
    if facts.patch is not None:
        yield Line(f"the cheapest that fits, as a merge patch of the ds_config: {json.dumps(facts.patch)}", "green")
    elif facts.recommended is None and any(need.fits is False for need in facts.needs):
        yield Line("nothing of this fits", "red")
    advice = facts.advice
    if advice.checkpointing is not None:
        what = "the config as given" if advice.checkpointing == "given" else "a row of these"
        yield Line(f"{what} would fit with activation checkpointing (--checkpointing)")
    if advice.ranks is not None:
        yield Line(f"it would fit on {advice.ranks} ranks ({advice.ranks // facts.ranks_per_host} such hosts)")
    if advice.row_micro_batch:
        yield Line(f"a row of these would fit with a micro-batch of {advice.row_micro_batch}")
    if advice.micro_batch is not None:
        told = "no micro-batch fits" if advice.micro_batch == 0 else f"largest micro-batch: {advice.micro_batch}"
        yield Line(f"with the config as given: {told}, longest sequence: {advice.sequence or 'none'}")
    for hint in advice.loading:
        yield Line(f"loading: {hint}")
