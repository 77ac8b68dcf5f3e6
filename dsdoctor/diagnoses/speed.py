"""Work that takes its time: steps outside of forward and backward, and a run that was not done when its time was up."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from statistics import median

from dsdoctor.case import Case
from dsdoctor.diagnoses import context
from dsdoctor.diagnoses.base import Diagnosis
from dsdoctor.diagnoses.standing import own_frame, standing, where
from dsdoctor.finding import Evidence, Finding, Fix
from dsdoctor.logs.facts import LogFacts
from dsdoctor.runs.facts import RankRun, Run

TIMED_STEPS = 3
"""Lines of timers below which they may be the first steps, which are always slow."""
MOST = 0.6
"""Share of a step from which on the optimizer is what takes the time."""


class OffloadBound(Diagnosis):
    """Most of the step is spent in the optimizer on the CPU, or in moving its states.

    What it is: with `offload_optimizer` Adam runs on the CPU. With one thread a rank (`OMP_NUM_THREADS=1`, which
    torchrun sets by default), too few cores, or slow memory it takes longer than forward and backward together.

    What proves it: DeepSpeed's own timers (`wall_clock_breakdown`): `step` is more than 60 % of forward, backward and
    step, and the optimizer is offloaded.

    When it could be wrong: forward and backward of a tiny model are so short that any optimizer looks long; the timers
    of the first steps hold allocations.

    What to do: more threads (`OMP_NUM_THREADS` = cores / ranks, `deepspeed --bind_cores_to_rank`), more accumulation so
    that the optimizer runs less often, or less offloading: a higher stage on more GPUs, or `ratio` below 1.
    """

    id = "speed/offload-bound"
    severity = "warning"
    title = "most of the step is the optimizer on the CPU"

    def examine(self, case: Case) -> Iterator[Finding]:
        logs = case.logs
        offloaded = _offloaded(case)
        if logs is None or offloaded is None:
            return
        times = {name: _times(logs, name) for name in ("forward_ms", "backward_ms", "step_ms")}
        if any(len(values) < TIMED_STEPS for values in times.values()):
            return
        usual = {name: median(values) for name, values in times.items()}
        share = usual["step_ms"] / (sum(usual.values()) or 1)
        if share <= MOST:
            return
        series = logs.series_of("step_ms")
        points = series.points[-1:] if series is not None else ()
        threads = [event.evidence() for event in logs.of_kind("one-thread")]
        yield self.finding(
            cause=f"the optimizer takes {usual['step_ms'] / 1000:.3g} s of each step ({share:.0%} of it) on the CPU"
            + (", with one thread a rank" if threads else ""),
            evidence=(*(point.evidence for point in points), *offloaded, *threads[:1]),
            confidence=0.8,
            fixes=(
                Fix(text="give it threads: OMP_NUM_THREADS = cores / ranks, or deepspeed --bind_cores_to_rank"),
                Fix(text="run it less often (more gradient_accumulation_steps), or offload less"),
            ),
            keys=("zero_optimization.offload_optimizer",),
        )


def _offloaded(case: Case) -> tuple[Evidence, ...] | None:
    """What says that the optimizer is offloaded; None if nothing does."""
    device = context.config_value(case, "zero_optimization.offload_optimizer.device")
    shown = [event.evidence() for event in case.logs.of_kind("cpu-adam")] if case.logs is not None else []
    return tuple(shown[:1]) if shown or device in ("cpu", "nvme") else None


def _times(logs: LogFacts, name: str) -> list[float]:
    series = logs.series_of(name)
    return [point.value for point in series.points] if series is not None else []


class OutOfTime(Diagnosis):
    """The time limit of the run was up while the script was still at work.

    What it is: each run has `--timeout` seconds. Slow training, data that is prepared or downloaded first, and a loop
    that never comes to its next step all use it up.

    What proves it: dsdoctor ended the run at the limit, and until shortly before a rank had printed something or had
    begun another forward, backward or step.

    When it could be wrong: what a script prints is taken as a sign of life, since long work mostly prints. A loop that
    prints for ever (it waits for a file, tries a download again) looks the same: the last lines and the stack tell.

    What to do: read the last line and the place of each rank. Let long preparation end once before, or give the run
    more time by a longer `--timeout`, or less to do by fewer `--steps`.
    """

    id = "speed/out-of-time"
    severity = "warning"
    title = "the time was up while the script was still at work"

    def examine(self, case: Case) -> Iterator[Finding]:
        run = case.run("with-deepspeed")
        if run is None or run.outcome != "timeout" or standing(case) is not None:
            return
        busy = min(
            (rank for rank in run.ranks if rank.quiet is not None and not rank.completed),
            key=lambda rank: rank.quiet or 0.0,
            default=None,
        )
        if busy is None:
            return
        frame = own_frame(busy)
        place = f" at {frame.file}:{frame.line} in {frame.function}" if frame else ""
        yield self.finding(
            cause=f"{_steps_made(run)} in {run.seconds:.0f} s; rank {busy.rank} was still at work{place}",
            evidence=tuple(_last_sign(run, rank) for rank in run.ranks),
            confidence=0.9,
            caveat="Whether it would have come to an end cannot be told from this.",
            fixes=(
                Fix(text=f"if it waits{place} for what never comes, mend that; else give it more time (--timeout)"),
            ),
        )


def _steps_made(run: Run) -> str:
    made = run.steps_made
    return f"{made} of {run.steps_asked} optimizer steps were made" if made else "no optimizer step was made"


def _last_sign(run: Run, rank: RankRun) -> Evidence:
    seen = where(run, rank)
    quiet = f"; nothing new for {rank.quiet:.0f} s" if rank.quiet is not None and rank.quiet >= 1 else ""
    printed = f"; it printed last: {rank.printed}" if rank.printed else ""
    return replace(seen, text=f"{seen.text}{quiet}{printed}")


DIAGNOSES: tuple[Diagnosis, ...] = (OffloadBound(), OutOfTime())
