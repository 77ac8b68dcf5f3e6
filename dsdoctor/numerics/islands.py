"""Which modules to keep in fp32, told from one forward of the whole batch in fp32. Plain numbers, no torch.

A module has to be in the island where what it takes or makes in fp32 would not fit the model's own type. The result may
be cast back where the island's last module makes something that fits again. It is not sure beforehand that the modules
behind take fp32 (a plain `Linear` does not), so there are candidates, the smallest first, and each has to be tried.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from dsdoctor.numerics.patch import Call


class Peak(Protocol):
    """One module call in fp32: largest magnitude taken and made."""

    @property
    def name(self) -> str: ...
    @property
    def taken(self) -> float: ...
    @property
    def made(self) -> float: ...


def candidates(peaks: Sequence[Peak], limit: float, first: str, dtype: str) -> list[list[Call]]:
    """Islands to try, the smallest first: the flagged module, the innermost hot ones, their common parent.

    The first one leaves its output in fp32 and lets type promotion carry it (a residual stream, a norm that computes in
    fp32 anyway); the others cast back where the values fit again.
    """
    hot = list(dict.fromkeys(peak.name for peak in peaks if max(peak.taken, peak.made) > limit))
    innermost = [name for name in hot if not any(_inside(other, name) for other in hot)]
    fits = {name: all(peak.made <= limit for peak in peaks if peak.name == name) for name in hot}
    found: list[list[Call]] = [[(first, None)]]
    if fits.get(first, False):
        found.insert(0, [(first, dtype)])
    if innermost:
        found.append([(name, dtype if fits[name] else None) for name in innermost])
        parent = _common(innermost, {peak.name for peak in peaks})
        found.append([(parent, dtype if all(p.made <= limit for p in peaks if p.name == parent) else None)])
    return [island for index, island in enumerate(found) if island not in found[:index]]


def _inside(inner: str, outer: str) -> bool:
    return inner != outer and (outer == "" or inner.startswith(f"{outer}."))


def _common(names: Sequence[str], called: set[str]) -> str:
    """The innermost module that holds all of these and is called itself (a list of modules is not)."""
    paths = [name.split(".") for name in names]
    shared: list[str] = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    while shared and ".".join(shared) not in called:
        shared.pop()
    return ".".join(shared)
