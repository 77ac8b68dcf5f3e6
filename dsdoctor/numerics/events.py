"""One suspicion: a non-finite value at one place and time of a rank. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dsdoctor.finding import FirstBad, Phase
from dsdoctor.numerics.frames import Frame

Place = tuple[str, str]
"""Module and tensor: what tells one suspicion from another between batches."""


@dataclass(frozen=True, kw_only=True)
class Origin:
    """What made the value: the operation, the cause class and its evidence in words.

    `line` is the line outside of torch that called the operation, as `file:number: text`. `deliberate` says that the
    program wrote the value as a constant (a mask); it is then no suspicion at all. `kind` is what the operation itself
    made, which may have become NaN by the place where it was seen; None where that is not known. `of_input`: it
    was made of a -inf which came into the module from outside, and which would have been a mask otherwise.
    """

    op: str | None = None
    kind: str | None = None
    cause: str = "unknown"
    detail: str = ""
    line: str | None = None
    deliberate: bool = False
    of_input: bool = False


@dataclass(frozen=True, kw_only=True)
class Event:
    """A non-finite value, before it is known whether it harms anything.

    `weak` marks a lone -inf that came from outside (a mask, most often): it counts only if nothing else was seen.
    `dtype` is the torch name of the tensor's type, `batch` the number of the batch, `order` the number of tensors'
    reports heard before in this step. `turned` is the place where an inf was first seen as NaN.
    """

    step: int
    micro_step: int
    phase: Phase
    module: str
    tensor: str
    kind: str
    dtype: str
    batch: int
    frames: tuple[Frame, ...] = ()
    origin: Origin = Origin()
    weak: bool = False
    order: int = 0
    turned: str | None = None

    @property
    def place(self) -> Place:
        return self.module, self.tensor

    def explained(self, origin: Origin) -> Event:
        return replace(self, origin=origin, kind=origin.kind or self.kind)

    def first_bad(self, rank: int) -> FirstBad:
        return FirstBad(
            rank=rank,
            step=self.step,
            micro_step=self.micro_step,
            phase=self.phase,
            module=self.module,
            tensor=self.tensor,
            kind=self.kind,
            op=self.origin.op,
            cause=self.origin.cause,
            detail=self.origin.detail,
            dtype=self.dtype,
            line=self.origin.line,
        )
