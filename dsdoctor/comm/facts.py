"""What the communication check saw: one list of steps a rank. Plain data, no torch. Times are seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from dsdoctor.comm.links import Link
from dsdoctor.comm.members import Member
from dsdoctor.comm.speeds import Speeds

StepStatus = Literal["passed", "failed", "wrong-value", "timeout", "not-offered", "unfinished"]
Ending = Literal["finished", "gave-up", "terminated", "stopped", "died", "silent", "lost", "never-started"]


@dataclass(frozen=True, kw_only=True)
class CommStep:
    """One step of one rank. `dtype` is empty where the step has none; `text` says what went wrong.

    `elements` is set where the step is made in several sizes.

    `timeout` means that the step's own deadline passed inside the rank; `unfinished` that the rank began it and was
    never heard of again. `not-offered` means that the backend has no such collective, which is no failure.
    """

    name: str
    status: StepStatus
    dtype: str = ""
    elements: int = 0
    seconds: float = 0.0
    text: str = ""
    stack: str = ""


@dataclass(frozen=True, kw_only=True)
class RankGpu:
    """The GPU that a rank is bound to, and its memory before the rank allocated anything. `uuid` as the driver has it,
    empty where this torch does not tell it."""

    uuid: str
    free_bytes: int
    total_bytes: int


@dataclass(frozen=True, kw_only=True)
class CommRank:
    """One rank of the check. `exit_code` is negative for a signal, None where it is not known.

    `ending`: `finished` did all steps or left with an exception of its own · `gave-up` a step passed its deadline, the
    rank said so and left · `terminated` was ended with the others (SIGTERM) · `stopped` was found stopped by a signal
    (SIGSTOP) · `died` was gone without a word · `silent` was there, and neither went on nor gave up · `lost` nothing
    was heard any more of the process beside it on its node · `never-started`.
    `time` is the moment of its last word, in seconds since the epoch.
    """

    rank: int
    pid: int | None = None
    host: str = ""
    device: str = ""
    gpu: RankGpu | None = None
    exit_code: int | None = None
    ending: Ending = "finished"
    time: float | None = None
    steps: tuple[CommStep, ...] = ()
    calls: tuple[str, ...] = ()
    """Collectives that torch's flight recorder showed as unfinished when a step passed its deadline, oldest first."""
    ras: str = ""
    """What NCCL's RAS service said of the job then; empty where it was not asked or did not answer."""

    @property
    def trouble(self) -> CommStep | None:
        """The first step that did not pass."""
        return next((step for step in self.steps if step.status not in ("passed", "not-offered")), None)

    @property
    def healthy(self) -> bool:
        """Did everything that was asked, so that what happened to the process afterwards proves nothing."""
        return bool(self.steps) and self.steps[-1].name == "goodbye" and self.trouble is None

    @property
    def where(self) -> str:
        """The step it came to, for a sentence: ` in all_reduce (bf16)`; empty where it began none."""
        if not self.steps:
            return ""
        step = self.trouble or self.steps[-1]
        return f" in {step.name}" + (f" ({step.dtype})" if step.dtype else "")

    @property
    def place(self) -> tuple[int, bool]:
        """How far it came: the steps it ended, and whether it stands inside the next one."""
        inside = bool(self.steps) and self.steps[-1].status in ("timeout", "unfinished")
        return len(self.steps) - inside, inside

    @property
    def arrived(self) -> bool:
        """Went through the rendezvous."""
        return any(step.name == "rendezvous" and step.status == "passed" for step in self.steps)


@dataclass(frozen=True, kw_only=True)
class Resolution:
    """What the name of the master resolves to on this machine; `error` where it does not.

    `local` says whether one of the addresses is this machine's own.
    """

    name: str
    addresses: tuple[str, ...] = ()
    local: bool = False
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """The check once more with something left out: the `variables` that were set for it, and whether it passed."""

    name: str
    variables: Mapping[str, str]
    passed: bool
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class CommFacts:
    """The check as a whole. `port_taken` is the error of listening on a port that the user chose, and who holds it.

    `ranks` is empty where the ranks were not started (the port was taken, or the name does not resolve). `device` and
    `backend` are what the ranks used, empty where none came so far.
    """

    world_size: int
    backend: str = ""
    device: str = ""
    asked_device: Literal["auto", "cpu", "cuda"] = "auto"
    master_addr: str = ""
    master_port: int | None = None
    port_taken: str = ""
    resolution: Resolution | None = None
    ranks: tuple[CommRank, ...] = ()
    members: tuple[Member, ...] = ()
    """Who came to a check that a launcher started on every node; empty where we started the ranks."""
    broken_links: tuple[Link, ...] = ()
    """Directions between nodes in which no connection comes about; the ranks were not let go then."""
    seen_by: int | None = None
    """Set where rank 0 could not be reached: this is all that this one rank knows."""
    cannot_meet: str = ""
    """Why this rank could not take part in the meeting at rank 0."""
    speeds: Speeds | None = None
    """How fast the ranks exchange; None where the check did not come so far."""
    experiments: tuple[Experiment, ...] = ()
    """What was tried after the check had failed on NCCL, in this order."""
    seconds: float = 0.0
    deadline: float = 30.0
    timed_out: bool = False
    """The limit for the check as a whole passed."""
    output: str = ""
    """The last lines that launcher and ranks printed, where the check did not pass."""

    @property
    def passed(self) -> bool:
        """Every rank answered and every value was right."""
        return len(self.ranks) == self.world_size > 0 and all(rank.healthy for rank in self.ranks)

    @property
    def problem(self) -> str:
        """In one line what did not pass, without a reason; empty where all passed."""
        if self.passed:
            return ""
        stuck = [f"rank {rank.rank} {rank.ending}{rank.where}" for rank in self.ranks if not rank.healthy]
        return self.cannot_meet or "; ".join(stuck) or self.port_taken or "no rank was started"

    def to_dict(self) -> dict[str, Any]:
        """For the details of the comm stage in the JSON document."""
        return asdict(self)
