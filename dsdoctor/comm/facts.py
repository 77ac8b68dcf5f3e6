"""What the communication check saw: one list of steps a rank. Plain data, no torch. Times are seconds."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

StepStatus = Literal["passed", "failed", "wrong-value", "timeout", "not-offered", "unfinished"]
Ending = Literal["finished", "died", "stopped", "never-started", "ended-by-us"]


@dataclass(frozen=True, kw_only=True)
class CommStep:
    """One step of one rank. `dtype` is empty where the step has none; `text` says what went wrong.

    `timeout` means that the step's own deadline passed inside the rank; `unfinished` that the rank began it and was
    never heard of again. `not-offered` means that the backend has no such collective, which is no failure.
    """

    name: str
    status: StepStatus
    dtype: str = ""
    seconds: float = 0.0
    text: str = ""
    stack: str = ""


@dataclass(frozen=True, kw_only=True)
class CommRank:
    """One rank of the check. `exit_code` is negative for a signal.

    `ending` is `stopped` where the process was found stopped by a signal (SIGSTOP) and `ended-by-us` where it was still
    running when the time was up.
    """

    rank: int
    pid: int | None = None
    host: str = ""
    device: str = ""
    exit_code: int | None = None
    ending: Ending = "finished"
    steps: tuple[CommStep, ...] = ()
    output: str = ""
    """The last lines that the rank printed, where it failed."""

    @property
    def trouble(self) -> CommStep | None:
        """The first step that did not pass."""
        return next((step for step in self.steps if step.status not in ("passed", "not-offered")), None)

    @property
    def healthy(self) -> bool:
        """Did everything that was asked, so that what happened to the process afterwards proves nothing."""
        return bool(self.steps) and self.steps[-1].name == "goodbye" and self.trouble is None

    @property
    def arrived(self) -> bool:
        """Went through the rendezvous."""
        return any(step.name == "rendezvous" and step.status == "passed" for step in self.steps)


@dataclass(frozen=True, kw_only=True)
class Resolution:
    """What the name of the master resolves to on this machine; `error` where it does not."""

    name: str
    addresses: tuple[str, ...] = ()
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class CommFacts:
    """The check as a whole. `port_taken` is the error of binding a port that the user chose, empty where it was free.

    `ranks` is empty where the ranks were not started (the port was taken, or the name does not resolve).
    """

    world_size: int
    backend: str
    device: Literal["cpu", "cuda"]
    master_addr: str = ""
    master_port: int | None = None
    port_taken: str = ""
    resolution: Resolution | None = None
    ranks: tuple[CommRank, ...] = ()
    seconds: float = 0.0
    deadline: float = 30.0
    shm_free: int | None = None
    problem: str = ""
    """Why the check could not be done at all, where that is not one of the above."""

    @property
    def passed(self) -> bool:
        """Every rank answered and every value was right."""
        return len(self.ranks) == self.world_size > 0 and all(rank.healthy for rank in self.ranks)

    def to_dict(self) -> dict[str, Any]:
        """For the details of the comm stage in the JSON document."""
        return asdict(self)
