"""What it means that a bad value does not come back when its micro-batch runs again. Plain data, no torch.

The runs tell apart memory that was never written, operations whose order of summation is free, and what is not in the
batch at all. They cannot tell a race between the streams of a run from a fault of the hardware: neither leaves a trace
in a second run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

_ELSEWHERE = "`dsdoctor nan replay` runs the kept batch on another machine, which tells whether it is this device"


@dataclass(frozen=True, kw_only=True)
class Repeats:
    """The same micro-batch, weights and random numbers, `runs` times; `bad` of them were not finite.

    `same_bits` says that all runs made the same outputs and gradients. `reads_unwritten` says that runs were not
    finite in which torch fills new memory with NaN; `where` it was so first. `fixed_order` says that runs with
    deterministic algorithms made the same bits, `unordered` are the operations that have no such algorithm;
    `one_thread` says the same of runs on one thread of the CPU. None: not tried, as nothing asked for it, or for want
    of time.
    """

    runs: int
    bad: int
    same_bits: bool
    reads_unwritten: bool | None = None
    where: str = ""
    fixed_order: bool | None = None
    unordered: tuple[str, ...] = ()
    one_thread: bool | None = None

    @property
    def meaning(self) -> str:
        """What follows from it, and what would settle the rest."""
        if self.reads_unwritten and not self.bad:
            at = f" ({self.where})" if self.where else ""
            return f"it reads memory that nothing was written to{at}: what is in there changes from run to run"
        if not self.same_bits:
            return self._varies()
        return (
            f"the batch alone does not make it: {self.runs} runs are finite and the same to the bit. It came from what "
            "the training does besides: communication that overlaps with computing, state of the script's own, or a "
            "passing fault of the hardware. I cannot tell which from here. Train once more: if it comes at the same "
            "step, it is the program's (try overlap_comm off); at another step or never, suspect a race or the device"
        )

    def _varies(self) -> str:
        often = f"{self.bad} of {self.runs} not finite" if self.bad else "all finite"
        varies = f"{self.runs} runs of the same work give different bits ({often})"
        if self.one_thread:
            return f"{varies}, and the same on one thread: threads race for the same memory, or sum in any order"
        if self.fixed_order:
            names = f" ({', '.join(self.unordered)})" if self.unordered else ""
            rest = "" if self.bad else ". That is rounding, which alone makes no value that is not finite"
            return (
                f"{varies}, and the same with deterministic algorithms: operations that sum in any order{names}{rest}"
            )
        how = " also with deterministic algorithms" if self.fixed_order is False else ""
        return (
            f"{varies},{how}: random numbers that torch does not hand out, a kernel without a fixed order, a race, or "
            f"the device. I cannot tell which from here. {_ELSEWHERE}"
        )

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "meaning": self.meaning}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Repeats:
        given = {name: value for name, value in values.items() if name != "meaning"}
        return cls(**{**given, "unordered": tuple(given["unordered"])})
