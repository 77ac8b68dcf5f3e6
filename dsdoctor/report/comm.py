"""The communication check for a person: who took part, how fast they exchange, and the same as part of a page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

from dsdoctor.comm.facts import CommFacts
from dsdoctor.comm.interfaces import Interface
from dsdoctor.comm.members import hosts, odd_ones_out
from dsdoctor.comm.nccl_log import NcclSummary
from dsdoctor.comm.ras import troubles
from dsdoctor.comm.speeds import Speeds
from dsdoctor.machine.interconnect import Way
from dsdoctor.units import rate, seconds, size

_MOST_ROWS = 64


def summary(facts: CommFacts) -> str:
    """The result in one line."""
    if not facts.passed:
        return facts.problem or "the check failed"
    where = f" on {len(hosts(facts.members))} nodes" if len(hosts(facts.members)) > 1 else ""
    return f"{facts.world_size} ranks{where} over {facts.backend} on {facts.device}: all values right"


@dataclass(frozen=True, kw_only=True)
class _Table:
    """Rows of equal length, the first one the header if `headed`; `shades` are hues by the text of a cell."""

    title: str
    rows: list[list[str]]
    headed: bool = True
    shades: Mapping[str, int] = field(default_factory=dict)


def lines(facts: CommFacts | None, nccl: NcclSummary | None = None) -> Iterator[str]:
    """Tables in plain text; nothing where nothing was learnt."""
    for table in _tables(facts, nccl):
        yield ""
        yield table.title
        yield from _aligned(table.rows)


def sections(facts: CommFacts | None, nccl: NcclSummary | None = None) -> list[str]:
    """The same tables in HTML, the pairs of ranks as a map of colours."""
    return [_html(table) for table in _tables(facts, nccl)]


def _tables(facts: CommFacts | None, nccl: NcclSummary | None) -> Iterator[_Table]:
    if facts is not None:
        yield from _of_the_check(facts)
    if nccl is not None and not nccl.silent:
        yield _Table(title="what NCCL logged", rows=nccl.table(), headed=False)


def _of_the_check(facts: CommFacts) -> Iterator[_Table]:
    if facts.members:
        yield _Table(title="who took part", rows=_members(facts))
        yield _Table(title="what they run", rows=_versions(facts), headed=False)
    if facts.speeds is not None:
        yield from _figures(facts.speeds)
    ras = next((rank.ras for rank in facts.ranks if rank.ras), "")
    if ras:
        told = [[line] for line in troubles(ras) or ("no error",)]
        yield _Table(title="what NCCL said of the job at that moment (RAS)", rows=told, headed=False)
    if facts.experiments:
        tried = [[one.name, "passes" if one.passed else one.problem] for one in facts.experiments]
        yield _Table(title="what was tried then", rows=tried, headed=False)


def _figures(speeds: Speeds) -> Iterator[_Table]:
    if speeds.collectives:
        yield _Table(title="time and bus bandwidth of one collective, by bytes", rows=_collectives(speeds))
    if len(speeds.pairs) > 1:
        yield _Table(title="pairs of ranks, in GB/s", rows=_pairs(speeds), shades=_shades(speeds))
    if speeds.pairs:
        yield _Table(title="links, by their specification and as measured between two ranks", rows=_links(speeds))


def _members(facts: CommFacts) -> list[list[str]]:
    compute = facts.speeds.compute if facts.speeds is not None else {}
    gpus = {rank.rank: rank.gpu for rank in facts.ranks if rank.gpu is not None}
    rows = [
        [
            "rank",
            "host",
            "local rank",
            "interface",
            "address",
            "clock",
            *(["GPU memory free"] if gpus else []),
            "compute",
        ]
    ]
    for member in facts.members[:_MOST_ROWS]:
        gpu = gpus.get(member.rank)
        free = [f"{size(gpu.free_bytes)} of {size(gpu.total_bytes)}" if gpu is not None else "?"] if gpus else []
        rows.append(
            [
                str(member.rank),
                member.host,
                str(member.local_rank),
                _interface(member.interface),
                member.address or "?",
                f"{member.clock:+.1f} s" if member.clock is not None else "?",
                *free,
                _short(compute[member.rank]) if member.rank in compute else "",
            ]
        )
    if len(facts.members) > _MOST_ROWS:
        rows.append(["…", f"{len(facts.members) - _MOST_ROWS} more", *[""] * (len(rows[0]) - 2)])
    return rows


def _interface(one: Interface) -> str:
    return (one.name or "?") + (f" ({one.kind})" if one.kind != "usual" else "")


def _versions(facts: CommFacts) -> list[list[str]]:
    """What most ranks have, and who has something else."""
    odd = {one.what: one for one in odd_ones_out(facts.members)}
    first = facts.members[0]
    names = [*dict.fromkeys(name for member in facts.members for name in member.versions)]
    usual = {**first.versions, **({"ds_config": first.config_hash} if first.config_hash else {})}
    rows = []
    for name in dict.fromkeys([*names, *usual, *odd]):
        if name in odd:
            others = Counter(odd[name].values)
            told = [f"{value} on {count} of {len(facts.members)} ranks" for value, count in others.items()]
            rows.append([name, odd[name].usual, "; ".join(told)])
        else:
            rows.append([name, usual.get(name, "none"), ""])
    return rows


def _collectives(speeds: Speeds) -> list[list[str]]:
    sizes = list(dict.fromkeys(one.bytes for one in speeds.collectives))
    by_name: dict[str, dict[int, str]] = {}
    for one in speeds.collectives:
        by_name.setdefault(one.collective, {})[one.bytes] = f"{_short(one.seconds)}, {rate(one.bus)}"
    return [["", *map(size, sizes)], *([name, *(row.get(s, "") for s in sizes)] for name, row in by_name.items())]


def _pairs(speeds: Speeds) -> list[list[str]]:
    ranks = sorted({rank for pair in speeds.pairs for rank in (pair.low, pair.high)})
    known = {(pair.low, pair.high): pair.bandwidth for pair in speeds.pairs}
    rows = [["", *map(str, ranks)]]
    for one in ranks:
        figures = [known.get((min(one, other), max(one, other))) for other in ranks]
        rows.append([str(one), *(f"{figure / 1e9:.2f}" if figure is not None else "·" for figure in figures)])
    return rows


def _links(speeds: Speeds) -> list[list[str]]:
    kinds: dict[tuple[bool, Way | None], list[float]] = {}
    for pair in speeds.pairs:
        kinds.setdefault((pair.across, pair.way), []).append(pair.bandwidth)
    rows = [["where", "link", "should give", "slowest", "fastest"]]
    for (across, way), measured in kinds.items():
        name = way.name if way is not None else "not known"
        best = rate(way.best) if way is not None and way.best else "not known"
        place = "between nodes" if across else "inside a node"
        rows.append([place, name, best, rate(min(measured)), rate(max(measured))])
    return rows


def _aligned(table: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    for row in table:
        yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _html(table: _Table) -> str:
    rows = "".join(_html_row(table, number, row) for number, row in enumerate(table.rows))
    return f"<h2>{escape(table.title)}</h2><table>{rows}</table>"


def _html_row(table: _Table, number: int, row: Sequence[str]) -> str:
    head = number == 0 and table.headed
    tag = "th" if head else "td"
    cells = []
    for place, cell in enumerate(row):
        shade = table.shades.get(cell) if place and not head else None
        style = f' style="background:hsl({shade} 70% 50% / .5)"' if shade is not None else ""
        cells.append(f"<{tag}{style}>{escape(cell)}</{tag}>")
    return f"<tr>{''.join(cells)}</tr>"


def _shades(speeds: Speeds) -> dict[str, int]:
    """Hue of every figure in the map: red for the slowest pair, green for the fastest."""
    figures = [pair.bandwidth for pair in speeds.pairs]
    low, high = min(figures), max(figures)
    spread = (high - low) or 1.0
    return {f"{figure / 1e9:.2f}": round(120 * (figure - low) / spread) for figure in figures}


def _short(count: float) -> str:
    """`12 µs`, `3.4 ms`; from a second on as everywhere."""
    if count >= 1:
        return seconds(count)
    return f"{count * 1e3:.1f} ms" if count >= 1e-3 else f"{count * 1e6:.0f} µs"
