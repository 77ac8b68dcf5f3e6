"""What is known of one observed run of the user's script. Plain data, no torch.

A run is made by `runs.supervise` from the trace files that the ranks wrote (`runs.trace`) and from what the parent
saw of their processes. Sizes are bytes, times seconds, steps are optimizer steps attempted, from 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from dsdoctor.finding import PHASES, FirstBad
from dsdoctor.loss_scale import LossScaleHistory
from dsdoctor.numerics.examined import Examined

Leg = Literal["probe", "with-deepspeed", "without-deepspeed", "repeat", "control-fp32", "numerics", "proof"]
"""`repeat` is the run without DeepSpeed once more, made where the two legs differ and no exception explains it: a
script that disagrees with itself is not deterministic. `proof` is the given config with only the keys in `Run.changed`
set otherwise."""
Outcome = Literal[
    "stopped",
    "finished",
    "raised",
    "exited",
    "killed",
    "out-of-memory",
    "hung",
    "timeout",
    "interrupted",
    "not-started",
]
"""`out-of-memory`: dsdoctor ended the run since host memory was nearly used up, before the kernel would have."""


Misuse = Literal["step-before-backward"]
"""What a script did against the rules of the engine, seen right before the engine raised for it."""


@dataclass(frozen=True, kw_only=True)
class Frame:
    """One line of a traceback or stack, outermost first in a list of them.

    `loops` are the first lines of the loops around it in its function, innermost first, for a stack of a living rank.
    """

    file: str
    line: int
    function: str
    text: str = ""
    loops: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Failure:
    """An exception that ended a rank, from a run's trace or read out of a log.

    `type` is the class name as Python prints it in a traceback, with its module where it has one
    (`torch.OutOfMemoryError`, `KeyError`); `message` is `str(exception)`. `source` is the stage or the log file, `line`
    the line of `message` in that file. `chain` holds the exceptions it was raised from, nearest first.
    """

    rank: int | None
    type: str
    message: str
    frames: tuple[Frame, ...] = ()
    source: str = ""
    line: int | None = None
    step: int | None = None
    time: float | None = None
    chain: tuple[Failure, ...] = ()
    message_lines: tuple[int, ...] = ()
    """The line of each line of the message, where it was read from a log."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One attempted optimizer step of one rank.

    `losses` has one value per micro-step, as the script computed them (before DeepSpeed's division by the number of
    accumulation steps); `grad_norm` is what the engine reports (None where it has none), `loss_scale` the scale that
    was attempted, `next_scale` the one after the step. `host_bytes` is the rank's resident size.
    """

    index: int
    losses: tuple[float, ...] = ()
    other_losses: tuple[float, ...] = ()
    """Those of the script's other engines since the step before."""
    grad_norm: float | None = None
    loss_scale: float | None = None
    next_scale: float | None = None
    skipped: bool = False
    lr: float | None = None
    seconds: float = 0.0
    host_bytes: int = 0
    device_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """The model a script handed to DeepSpeed. Counts are elements, tied parameters counted once."""

    class_name: str
    parameters: int
    trainable: int
    largest_layer: int
    dtypes: tuple[tuple[str, int], ...] = ()
    parameter_groups: int = 1
    model_type: str | None = None
    trained_in: str | None = None
    """`model_type` and the dtype of the checkpoint, where the model carries a Hugging Face config."""
    partitioned: bool = False
    """It was built under `zero.Init`, so that no rank holds the whole of it."""


@dataclass(frozen=True, kw_only=True)
class EngineFacts:
    """How the engine was built: the config in force and what follows from it."""

    framework: Literal["deepspeed", "transformers", "accelerate", "lightning"]
    config: dict[str, Any]
    precision: Literal["fp32", "fp16", "bf16"]
    zero_stage: int
    optimizer: str | None
    gradient_accumulation_steps: int = 1
    dynamic_loss_scale: bool = False
    min_loss_scale: float | None = None


@dataclass(frozen=True, kw_only=True)
class Collective:
    """A collective that a rank called: the `number`-th of its process group, counted from 1.

    `group` tells groups apart, `group_name` is what a person calls them. Sizes and dtypes are of the inputs.
    """

    group: str
    group_name: str
    number: int
    operation: str
    sizes: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[str, ...] = ()
    finished: bool = False

    def __str__(self) -> str:
        shapes = ", ".join("x".join(map(str, size)) or "1" for size in self.sizes)
        what = f" of {shapes} {'/'.join(dict.fromkeys(self.dtypes))}" if shapes else ""
        named = {"default_pg": "the default group", "undefined": "", "": ""}.get(self.group_name, self.group_name)
        return f"{self.operation}{what} (number {self.number} of {named or f'group {self.group}'})"


@dataclass(frozen=True, kw_only=True)
class RankRun:
    """One rank of a run.

    `exit_code` is negative for a signal, None if the process was still there when we ended it. `completed` says that
    the rank did all it was asked to (ended by itself without an error, or reached the last step), so that what happens
    to the process afterwards proves nothing. `last_phase` is script, forward, backward, step or stopped;
    `last_step` counts the steps that were begun. `stack` is where it stood when it was found hanging.
    """

    rank: int
    pid: int | None = None
    host: str = ""
    exit_code: int | None = None
    completed: bool = False
    ended_by_us: bool = False
    called_engine: bool = False
    last_phase: str = "not started"
    last_step: int = 0
    failure: Failure | None = None
    steps: tuple[Step, ...] = ()
    stack: tuple[Frame, ...] = ()
    quiet: float | None = None
    """Seconds for which it had written nothing, to its trace or as output, when a time limit ended the run."""
    printed: str = ""
    """The last line that it printed by then, or its last lines where it ended itself with an error code."""
    state: str = ""
    """The kernel's letter for its process when it was asked for its stack: T is stopped, D waits in the kernel."""
    moved: bool = False
    """Its stack changed from one look to the next, a second later."""
    collectives: tuple[Collective, ...] = ()
    """The last ones that it called, in their order, where it was asked for them."""
    misuse: tuple[Misuse, ...] = ()
    first_bad: FirstBad | None = None
    frames_report: str = ""
    patch: str = ""
    examined: Examined | None = None
    """Text of the frames before the first bad value, the ready patch of that module's forward, and what running the
    batch again showed."""


@dataclass(frozen=True, kw_only=True)
class MemorySample:
    """Host memory at one moment: the ranks together, and what the machine (or cgroup) still had."""

    seconds: float
    ranks_bytes: int
    available_bytes: int


@dataclass(frozen=True, kw_only=True)
class OomKill:
    """A process that the kernel killed for lack of memory, as its log names it. In a container the pid may be another
    one than inside."""

    pid: int
    name: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of the script over all its ranks."""

    leg: Leg
    engine: Literal["deepspeed", "plain"]
    precision: Literal["as-configured", "fp32"]
    outcome: Outcome
    ranks: tuple[RankRun, ...]
    seconds: float
    folder: str
    world_size: int
    why: str = ""
    model: ModelFacts | None = None
    facts: EngineFacts | None = None
    notes: tuple[str, ...] = ()
    """What dsdoctor changed for this run (fp16 check lifted, inputs cast, saves redirected, ...)."""
    written: tuple[str, ...] = ()
    """Files that the script itself wrote in its working directory, relative to it."""
    memory: tuple[MemorySample, ...] = ()
    oom_kills: int = 0
    """By how much the cgroup's (or kernel's) counter of out-of-memory kills grew during the run, here or where the
    ranks ran."""
    kernel_kills: tuple[OomKill, ...] = ()
    """What the kernel's log said of such kills meanwhile, where it may be read."""
    launcher_exit: int | None = None
    steps_asked: int = 0
    stall_limit: float = 60.0
    """Seconds without a sign of any rank after which a run counts as hung."""
    loss_scale: LossScaleHistory | None = None
    changed: tuple[str, ...] = ()
    """Dotted ds_config keys in which this run differs from the given config, where it is a proof."""
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def not_played(self) -> str:
        """Why the plain engine could not play this script's part of DeepSpeed, empty where it could."""
        said = (
            f.message for f in self.failures if f.type.endswith("NotPlayed") or f.type.endswith("UnsupportedByPlain")
        )
        return next(said, "")

    @property
    def steps_made(self) -> int:
        """Optimizer steps of the rank that made the most; 0 where none came as far as that."""
        return max((len(rank.steps) for rank in self.ranks), default=0)

    @property
    def first_bad(self) -> FirstBad | None:
        """The earliest non-finite value over the ranks: by step, micro-step, phase, then rank."""
        found = [rank.first_bad for rank in self.ranks if rank.first_bad is not None]
        return min(found, key=lambda bad: (bad.step, bad.micro_step, PHASES.index(bad.phase), bad.rank), default=None)

    @property
    def examined(self) -> Examined | None:
        """What running the batch of the earliest non-finite value again showed."""
        first = self.first_bad
        return next((rank.examined for rank in self.ranks if rank.first_bad == first), None) if first else None

    @property
    def failures(self) -> tuple[Failure, ...]:
        """Exceptions of the ranks, in the order of their time."""
        found = [r.failure for r in self.ranks if r.failure is not None]
        return tuple(sorted(found, key=lambda f: f.time or 0.0))
