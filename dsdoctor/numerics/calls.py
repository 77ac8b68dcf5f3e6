"""One running module call, from its pre-hook to its forward hook. Runs in rank processes only."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor, nn

from dsdoctor.numerics.events import Event
from dsdoctor.numerics.frames import Row
from dsdoctor.numerics.replay import RandomState


@dataclass(slots=True, eq=False)
class Call:
    """A module call in progress. `spoiled` says that a bad value went in, or was made below it, in this call.

    `born_between` is a suspicion that arose in the module's own code between two submodules, with the one that was
    handed the value. `versions` are the inputs' in-place counters, by which a module that overwrites them is known.
    """

    module: nn.Module
    name: str
    rows: list[Row] = field(default_factory=list)
    inputs: list[Row] = field(default_factory=list)
    spoiled: bool = False
    versions: list[int] = field(default_factory=list)
    random_state: RandomState | None = None
    born_between: tuple[Event, nn.Module] | None = None


class CallStack:
    """The calls that run now, outermost first. A call whose end was not seen is dropped with the one around it."""

    def __init__(self) -> None:
        self._calls: list[Call] = []

    def __bool__(self) -> bool:
        return bool(self._calls)

    @property
    def top(self) -> Call | None:
        return self._calls[-1] if self._calls else None

    def push(self, call: Call) -> None:
        self._calls.append(call)

    def pop(self, module: nn.Module) -> Call | None:
        """The innermost running call of that module, None if its start was not seen."""
        for index in range(len(self._calls) - 1, -1, -1):
            if self._calls[index].module is module:
                call = self._calls[index]
                del self._calls[index:]
                return call
        return None

    def clear(self) -> None:
        self._calls.clear()


def versions(tensors: list[Tensor]) -> list[int]:
    """The in-place counters of tensors (inference tensors have none)."""
    return [-1 if tensor.is_inference() else tensor._version for tensor in tensors]
