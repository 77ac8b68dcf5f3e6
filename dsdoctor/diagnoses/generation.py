"""Text generation under ZeRO-3 that hangs, and work that is only slow."""

from __future__ import annotations

import re
from collections.abc import Iterator

from dsdoctor.case import Case
from dsdoctor.diagnoses import context
from dsdoctor.diagnoses.base import Diagnosis
from dsdoctor.diagnoses.forms import MAX_EVIDENCE
from dsdoctor.diagnoses.timeouts import timed_out
from dsdoctor.finding import Evidence, Finding, Fix
from dsdoctor.frames import passes_through

_GENERATE = r":generate:|generation[/\\]utils\.py"
_ZERO3 = r"deepspeed[/\\]runtime[/\\]zero[/\\](?:partition|parameter_offload)"
_SLOW_WORK = rf"{_GENERATE}|{_ZERO3}|cpu_adam|swap_tensor"
_CTRL_C = re.compile(r"Received 2 death signal|received SIGINT")
SLOW_BARS = 3
"""Lines of a bar that moves by more than a minute a step, after which it is no accident."""


class GenerateHang(Diagnosis):
    """Ranks generate texts of unequal length under ZeRO-3, and one waits for ever in a gather that no other joins.

    What it is: every forward pass under ZeRO-3 gathers parameters on all ranks together. A rank whose texts are
    finished stops generating, and another that has more tokens to write waits in the next gather.

    What proves it: collectives time out under ZeRO-3 and a rank's stack stands in `generate`.

    When it could be wrong: generation under ZeRO-3 gathers all weights for each token and can be so slow that it looks
    like a hang; two stacks some minutes apart tell.

    What to do: `generate(..., synced_gpus=True)`; or gather the weights once around the generation
    (`GatheredParameters`), or generate with another engine.
    """

    id = "zero3/generate-hang"
    severity = "error"
    title = "ranks generate texts of unequal length under ZeRO-3"

    def examine(self, case: Case) -> Iterator[Finding]:
        late = timed_out(case)
        inside = _in_generate(case)
        if not late or not inside or not _stage_3(case):
            return
        yield self.finding(
            cause="a rank stands in generate() under ZeRO-3 while collectives of the ranks time out",
            evidence=(*inside[:1], *late)[:MAX_EVIDENCE],
            confidence=0.8,
            caveat="Generation that gathers all weights for each token may also be only very slow.",
            fixes=(
                Fix(text="pass synced_gpus=True to generate(), so that every rank goes on until the last one is done"),
                Fix(text="or gather the weights once around it: with deepspeed.zero.GatheredParameters(...)"),
            ),
            keys=("zero_optimization.stage",),
        )


class SlowNotHung(Diagnosis):
    """The job made progress, only very slowly, and somebody stopped it as hung.

    What it is: generation under ZeRO-3 gathers every weight for every token; offloading moves states over the bus in
    every step; the first step compiles or fills caches. A bar that moves every few minutes looks as if it stood still.

    What proves it: a progress bar that moved by more than a minute a step until the job was stopped by hand, in work
    that is known to be slow (the stack, ZeRO-3 or offloading tell).

    When it could be wrong: a run with a very large batch is as slow as that by design, and may have been stopped for
    another reason.

    What to do: wait; or gather the weights once around the generation (`deepspeed.zero.GatheredParameters`), offload
    less (`offload_param` first), raise `stage3_prefetch_bucket_size`, and give the CPU's Adam more threads
    (`OMP_NUM_THREADS`). Two `py-spy dump --pid PID` some minutes apart that differ prove that it moves.
    """

    id = "hang/slow-not-hung"
    severity = "warning"
    title = "slow, but not hung, when it was stopped"

    def examine(self, case: Case) -> Iterator[Finding]:
        logs = case.logs
        slow = [event for event in logs.of_kind("slow-bar") if event.count >= SLOW_BARS] if logs is not None else []
        stopped = _by_hand(case)
        if not slow or not stopped or not _heavy(case):
            return
        yield self.finding(
            cause="the bar still moved, by more than a minute a step, when the job was stopped by hand: slow, not hung",
            evidence=(slow[0].evidence(), stopped[0]),
            confidence=0.6,
            caveat="A very large batch takes that long by design.",
            fixes=(
                Fix(
                    text="gather the weights once around generation (GatheredParameters), or use another engine for it"
                ),
                Fix(text="offload less, and give the CPU's Adam more threads (OMP_NUM_THREADS)"),
            ),
        )


def _by_hand(case: Case) -> tuple[Evidence, ...]:
    """Ctrl-C, as a rank or the launcher shows it."""
    raised = [context.evidence(f) for f in context.failures(case) if f.type == "KeyboardInterrupt"]
    told = [e.evidence() for e in case.logs.of_kind("cancelled") if _CTRL_C.search(e.text)] if case.logs else []
    return (*raised, *told)


def _in_generate(case: Case) -> tuple[Evidence, ...]:
    """Stacks that stand in generation: of exceptions, or of py-spy in the log."""
    raised = [context.evidence(f) for f in context.failures(case) if passes_through(f.frames, _GENERATE)]
    dumped = [event.evidence() for event in case.logs.of_kind("generate-frame")] if case.logs is not None else []
    return (*raised, *dumped)


def _stage_3(case: Case) -> bool:
    return context.stage(case) == 3 or any(passes_through(f.frames, _ZERO3) for f in context.failures(case))


def _heavy(case: Case) -> bool:
    """True if the job does what is known to be slow."""
    offloads = any(
        context.config_value(case, f"zero_optimization.offload_{what}.device") in ("cpu", "nvme")
        for what in ("param", "optimizer")
    )
    return offloads or _stage_3(case) or any(passes_through(f.frames, _SLOW_WORK) for f in context.failures(case))


DIAGNOSES: tuple[Diagnosis, ...] = (GenerateHang(), SlowNotHung())
