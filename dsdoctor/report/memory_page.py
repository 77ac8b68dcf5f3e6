"""The memory model as a page: stacked bars over the timeline as inline SVG, and the rows as a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from dsdoctor.memory.facts import DeviceNeed, Holding, MemoryFacts, Need
from dsdoctor.units import size

CATEGORIES = ("weights", "gradients", "optimizer", "buffers", "activations", "overhead")
_COLOURS = ("#2563eb", "#d97706", "#059669", "#7c3aed", "#dc2626", "#6b7280")
_WIDTH, _BAR, _GAP, _LEFT, _RIGHT = 720, 18, 8, 150, 90


def sections(facts: MemoryFacts) -> tuple[str, ...]:
    """Parts of the page, HTML already: the bars of the given config, its terms, all rows, what was assumed."""
    need = facts.current
    bars: list[str] = []
    if need is not None and facts.device == "cuda":
        bars.append(_figure("each GPU over time", need.per_gpu, facts.gpu_bytes))
    if need is not None:
        bars.append(_figure("each host over time", need.per_host, facts.host_bytes))
    return (_head(facts), *bars, _legend(), _terms(facts), _rows(facts), _assumed(facts))


def _head(facts: MemoryFacts) -> str:
    hosts = facts.ranks // facts.ranks_per_host
    return f"<p>{escape(facts.model)}: {facts.parameters:,} parameters, {facts.ranks} ranks on {hosts} host(s)</p>"


def _figure(title: str, need: DeviceNeed, limit: int | None) -> str:
    full = max(need.peak, limit or 0, 1)
    height = (_BAR + _GAP) * len(need.moments) + _GAP
    bars = "".join(
        _stacked(one.name, one.holding, _GAP + index * (_BAR + _GAP), full) for index, one in enumerate(need.moments)
    )
    told = f"{title}: highest {size(need.peak)} at {need.peak_moment}" + (f" of {size(limit)}" if limit else "")
    return (
        f"<h2>{escape(told)}</h2>"
        f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{escape(told)}"><title>{escape(told)}</title>'
        f"{bars}{_line(limit, full, height)}</svg>"
    )


def _stacked(name: str, holding: Holding, y: int, full: int) -> str:
    parts, x = [], float(_LEFT)
    for category, colour in zip(CATEGORIES, _COLOURS, strict=True):
        amount = getattr(holding, category)
        width = _scaled(amount, full)
        told = escape(f"{name}: {category} {size(amount)}")
        if amount:
            shape = f'x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_BAR}" fill="{colour}"'
            parts.append(f"<rect {shape}><title>{told}</title></rect>")
        x += width
    label = f'<text x="{_LEFT - 6}" y="{y + 13}" text-anchor="end">{escape(name)}</text>'
    return label + "".join(parts) + f'<text x="{x + 4:.1f}" y="{y + 13}">{escape(size(holding.total))}</text>'


def _line(limit: int | None, full: int, height: int) -> str:
    if limit is None:
        return ""
    x = _LEFT + _scaled(limit, full)
    return (
        f'<path class="bad" stroke-width="2" d="M{x:.1f} 0V{height}"><title>{escape(size(limit))} free</title></path>'
    )


def _scaled(amount: int, full: int) -> float:
    return amount / full * (_WIDTH - _LEFT - _RIGHT)


def _legend() -> str:
    marks = (
        f'<span style="color:{colour}">&#9632;</span> {name}' for name, colour in zip(CATEGORIES, _COLOURS, strict=True)
    )
    return f"<p>{' &nbsp; '.join(marks)}; the red line is what is free</p>"


def _terms(facts: MemoryFacts) -> str:
    rows = ((one.place, one.name, size(one.bytes), one.basis, one.note) for one in facts.terms)
    return "<h2>where the bytes go</h2>" + _table(("place", "what", "bytes", "basis", ""), rows)


def _rows(facts: MemoryFacts) -> str:
    head = ("", "stage", "precision", "optimizer", "parameters", "GPU", "host", "NVMe", "slower")
    rows = (_row(need, chosen=index == facts.recommended) for index, need in enumerate(facts.needs))
    return "<h2>rows, the fastest first</h2>" + _table(head, rows)


def _row(need: Need, *, chosen: bool) -> tuple[str, ...]:
    fits = {True: "fits", False: "does not fit", None: "unknown"}[need.fits]
    notes = [fits, *(["given"] if need.current else []), *(["recommended"] if chosen else [])]
    slower = f"x{need.cost.slowdown:.2f}" if need.cost is not None else ""
    sizes = (size(need.per_gpu.peak), size(need.per_host.peak), size(need.per_nvme))
    offloads = (need.offload_optimizer, need.offload_param)
    return (", ".join(notes), str(need.stage), need.precision, *offloads, *sizes, slower)


def _assumed(facts: MemoryFacts) -> str:
    return "<h2>assumed</h2><ul>" + "".join(f"<li>{escape(text)}</li>" for text in facts.assumptions) + "</ul>"


def _table(head: Sequence[str], rows: Iterator[tuple[str, ...]]) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    return f"<table>{line(head, 'th')}{''.join(line(row, 'td') for row in rows)}</table>"
