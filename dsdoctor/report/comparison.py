"""Where two runs part, for the terminal and for the document."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from dsdoctor.numerics.comparing import FACTOR, Comparison, Pair, Parting, place, rms
from dsdoctor.numerics.numbers import Number

_MEASURES = ("bits", "rounding", "factor")
_MANY = 1000


def lines(comparison: Comparison, names: tuple[str, str], *, batches: bool = False) -> Iterator[str]:
    """What a person reads. `names` are what the two sides are called; two `batches` have no step in common to name."""
    ranks = f"rank {comparison.ranks[0]}" if len(comparison.ranks) == 1 else f"{len(comparison.ranks)} ranks"
    steps = f"{comparison.steps} step{'s' if comparison.steps != 1 else ''}"
    yield f"A  {names[0]}"
    yield f"B  {names[1]}"
    of = "a batch" if batches else steps
    yield f"compared: {comparison.compared:,} tensors of {of} on {ranks}, in the order in which they came to be"
    for side, (count, first) in (("A", comparison.only_a), ("B", comparison.only_b)):
        if count:
            yield f"only in {side}: {count:,} tensors, the first is the {first}"
    told: list[Pair] = []
    for name in _MEASURES:
        parting: Parting | None = getattr(comparison, name)
        if parting is None:
            yield f"{_HEADS[name]}: nowhere"
        elif any(parting.pair is pair for pair in told):
            yield f"{_HEADS[name]}: the same place"
        else:
            yield from _parting(_HEADS[name], parting, timed=not batches)
            told.append(parting.pair)


_HEADS = {
    "bits": "first different bits",
    "rounding": "first difference that rounding does not explain",
    "factor": f"first difference by a factor of {FACTOR:g}",
}


def _parting(head: str, parting: Parting, *, timed: bool) -> Iterator[str]:
    pair = parting.pair
    number = pair.a
    if head == _HEADS["rounding"] and pair.eps:
        head += f" (more than {pair.allowed:.3g} eps of {pair.eps:.2g})"
    when = f"step {number.step}, micro-step {number.micro_step}, " if timed else ""
    yield f"{head}: {when}rank {pair.rank}, {place(number)}"
    yield f"    {'A abs max':>10} {'B abs max':>10} {'B / A':>9} {'rms apart':>10}"
    for before in parting.before:
        yield f"    {_row(before)}"
    yield f"  > {_row(pair)}"
    if pair.a.dtype != pair.b.dtype:
        yield f"    A is {pair.a.dtype}, B {pair.b.dtype}"
    if pair.a.count != pair.b.count:
        yield f"    A has {pair.a.count:,} elements, B {pair.b.count:,}"
    if parting.drifted:
        seen = ", ".join(f"step {p.a.step}: {_share(p)}" for p in parting.earlier)
        yield f"    it came gradually; the same tensor before: {seen}"


def _row(pair: Pair) -> str:
    ratio = f"{pair.ratio:9.4g}" if pair.ratio is not None else f"{'–':>9}"
    return f"{pair.a.high:10.3e} {pair.b.high:10.3e} {ratio} {_share(pair):>10}  {place(pair.a)}"


def _share(pair: Pair) -> str:
    """How far apart the root mean squares are: in eps of the coarsest type so far, in percent where that is far."""
    if pair.same_bits:
        return "same bits"
    if pair.difference is None or not pair.eps:
        return "–"
    units = pair.difference / pair.eps
    return f"{units:.2g} eps" if units < _MANY else f"{100 * pair.difference:.2g} %"


def to_dict(comparison: Comparison) -> dict[str, Any]:
    """The document's part. `rms_difference` is relative, `eps` that of the coarsest type so far."""
    return {
        "compared": comparison.compared,
        "steps": comparison.steps,
        "ranks": list(comparison.ranks),
        "only_a": {"count": comparison.only_a[0], "first": comparison.only_a[1]},
        "only_b": {"count": comparison.only_b[0], "first": comparison.only_b[1]},
        **{name: _parting_dict(getattr(comparison, name)) for name in _MEASURES},
    }


def _parting_dict(parting: Parting | None) -> dict[str, Any] | None:
    if parting is None:
        return None
    return {
        **_pair_dict(parting.pair),
        "gradually": parting.drifted,
        "before": [_pair_dict(pair) for pair in parting.before],
        "earlier": [_pair_dict(pair) for pair in parting.earlier],
    }


def _pair_dict(pair: Pair) -> dict[str, Any]:
    number = pair.a
    return {
        "rank": pair.rank,
        "step": number.step,
        "micro_step": number.micro_step,
        "phase": number.phase,
        "module": number.module,
        "tensor": number.tensor,
        "ratio": pair.ratio,
        "rms_difference": pair.difference,
        "eps": pair.eps,
        "a": _side(pair.a),
        "b": _side(pair.b),
    }


def _side(number: Number) -> dict[str, Any]:
    size = rms(number)
    return {
        "dtype": number.dtype,
        "elements": number.count,
        "abs_min": number.low,
        "abs_max": number.high,
        "rms": size if size is not None and math.isfinite(size) else None,
    }
