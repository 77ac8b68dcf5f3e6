"""Host memory that ran out: refused allocations, and processes that were killed for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from dsdoctor.case import Case
from dsdoctor.diagnoses import context, memory_numbers
from dsdoctor.diagnoses.base import Diagnosis
from dsdoctor.diagnoses.forms import MAX_EVIDENCE, Form
from dsdoctor.diagnoses.memory_request import PINNED, asked_bytes, is_absurd
from dsdoctor.diagnoses.peers import roots
from dsdoctor.diagnoses.processes import KILL, Ending, memory_curve, memory_verdict
from dsdoctor.diagnoses.standing import where
from dsdoctor.finding import Evidence, Finding, Fix
from dsdoctor.runs.facts import Failure, Run
from dsdoctor.units import size


class HostOomKill(Diagnosis):
    """The kernel, or the container's memory limit, killed a process for lack of host memory.

    What it is: a rank ends with -9 (137 in a shell or container, 247 from the `deepspeed` command) without a traceback.
    Loading the model alone can do it: ranks on the node times the full model, without any offloading. With offloading
    come 16 to 20 bytes a parameter, and pinned buffers rounded up to powers of two. It is host memory: a full GPU
    raises a Python exception. An allocation that is refused instead (`DefaultCPUAllocator`, `MemoryError`,
    `std::bad_alloc`, or CUDA failing to pin host memory) means the same.

    What proves it: the counter of out-of-memory kills grew, the kernel or the scheduler says so, or host memory was
    nearly full at the end. In a run of its own dsdoctor ends the ranks just before that, and shows the curve.

    When it could be wrong: with the exit code alone a user, a watchdog or a scheduler may have sent the signal; the
    kernel log (`dmesg`), `memory.events` of the cgroup or the scheduler's accounting settle it.

    What to do: `dsdoctor memory DS_CONFIG --model config.json --host 512GiB` computes the need. `dmesg -T | grep -i
    'killed process'` and `cat /sys/fs/cgroup/memory.events` say whether it was the kernel. More memory or swap,
    `zero.Init` or low-memory loading, fewer ranks while loading, `"device": "nvme"` instead of `"cpu"`.
    """

    id = "memory/host-oom-kill"
    severity = "error"
    title = "a process was killed for lack of host memory"
    forms = (
        Form(message=r"DefaultCPUAllocator: (?:can't|not enough memory)|std::bad_alloc"),
        Form(types=("MemoryError", "ArrayMemoryError", "_ArrayMemoryError")),
        Form(types=("OSError",), message=r"Cannot allocate memory"),
        Form(message=r"DataLoader worker .* is killed by signal: Killed"),
        PINNED,
    )
    _keys = ("zero_optimization.offload_optimizer", "zero_optimization.offload_param")
    _fixes = (
        Fix(text="compute the need of the host: dsdoctor triage DS_CONFIG TRAIN.py --stages memory"),
        Fix(text="load the model once or sharded (zero.Init, low-memory loading), or with fewer ranks at a time"),
        Fix(text="more memory or swap for the host or container; offload to NVMe instead of the CPU"),
    )

    def claims(self, failure: Failure, case: Case) -> bool:
        return not is_absurd(failure) and any(form.match(failure) for form in self.forms)

    def examine(self, case: Case) -> Iterator[Finding]:
        run = context.own_run(case)
        if run is not None and run.outcome == "out-of-memory":
            yield self._ended_before(run)
            return
        refused = [failure for failure in context.failures(case) if self.claims(failure, case)]
        if refused:
            proof = tuple(map(context.evidence, refused))
            found = self._found(_refusal(refused[0]), proof, 0.85, None, title=_RAN_OUT)
            pinned = PINNED.match(refused[0]) is not None
            yield replace(found, fixes=(_UNPINNED, *found.fixes)) if pinned else found
            return
        aborted = list(case.logs.of_kind("host-allocation")) if case.logs is not None else []
        if aborted and case.logs is not None and case.logs.end == "failed":
            proof = tuple(event.evidence() for event in aborted[:1])
            yield self._found(
                "host memory ran out: C++ code was refused an allocation", proof, 0.8, None, title=_RAN_OUT
            )
            return
        yield from self._killed(case)

    def _ended_before(self, run: Run) -> Finding:
        """dsdoctor ended the run before the kernel had to."""
        left = min((sample.available_bytes for sample in run.memory), default=0)
        stacks = tuple(where(run, rank) for rank in run.ranks if rank.stack)
        return self.finding(
            title=_RUNS_OUT,
            cause=f"the run used up the memory of the host (or the limit of its container): {left / 2**30:.2f} GiB "
            "were left when dsdoctor ended it, before the kernel would have killed a process",
            evidence=(Evidence(source=run.leg, text=memory_curve(run)), *stacks)[:MAX_EVIDENCE],
            confidence=0.9,
            caveat="Other programs on this machine use the same memory.",
            fixes=self._fixes,
            keys=self._keys,
        )

    def _killed(self, case: Case) -> Iterator[Finding]:
        killed = roots(case, KILL)
        said = list(case.logs.of_kind("oom-kill")) if case.logs is not None else []
        run = context.own_run(case)
        verdict = memory_verdict(run) if run is not None and killed else None
        if verdict is not None and run is not None:
            if verdict.out_of_memory:
                measured = tuple(
                    Evidence(source=run.leg, text=text) for text in (verdict.text, memory_curve(run)) if text
                )
                measured = (killed[0].evidence, *measured)
                who = killed[0].who
                yield self._found(f"{who} was killed for lack of host memory", measured, verdict.confidence, None)
            return
        if said:
            proof = (*(event.evidence() for event in said), *(ending.evidence for ending in killed))
            yield self._found("the kernel or the scheduler killed a process for lack of host memory", proof, 0.95, None)
        elif killed:
            yield self._by_code(case, killed)

    def _by_code(self, case: Case, killed: list[Ending]) -> Finding:
        """Nothing but the exit code says so; a sum of what was needed makes it likelier."""
        text = f"{killed[0].who} was killed (-9) without a traceback, which is most often a lack of host memory"
        proof = (*(ending.evidence for ending in killed[:1]), *self._last_phase(case))
        needed = memory_numbers.host_sum(case.logs) if case.logs is not None else None
        if needed is None or not needed.tight:
            return self._found(text, (*proof, *(ending.evidence for ending in killed[1:])), 0.6, _ONLY_A_CODE)
        return self._found(f"{text}; {needed.told()}", (*proof, *needed.evidence), 0.8, _ONLY_A_CODE)

    def _last_phase(self, case: Case) -> tuple[Evidence, ...]:
        """The last thing that DeepSpeed said it was about to do, or how far the loading of the weights had come."""
        known = ("memory-phase", "weights-loading")
        events = list(case.logs.of_kind(*known)) if case.logs is not None else []
        return (max(events, key=lambda event: event.order).evidence(),) if events else ()

    def _found(
        self,
        cause: str,
        proof: tuple[Evidence, ...],
        confidence: float,
        caveat: str | None,
        title: str | None = None,
    ) -> Finding:
        return self.finding(
            title=title,
            cause=cause,
            evidence=proof[:MAX_EVIDENCE],
            confidence=confidence,
            caveat=caveat,
            fixes=self._fixes,
            keys=self._keys,
        )


_UNPINNED = Fix(text='"pin_memory": false in offload_optimizer and offload_param (slower copies, but no pinned memory)')
_RAN_OUT = "host memory ran out"
_RUNS_OUT = "host memory runs out"
_ONLY_A_CODE = (
    "The exit code alone does not say who sent SIGKILL: a scheduler, a watchdog or a person may have. dmesg, the "
    "cgroup's memory.events or the scheduler's accounting settle it."
)


def _refusal(failure: Failure) -> str:
    """The sentence about an allocation that was refused, with its size where the message has it."""
    if PINNED.match(failure) is not None:
        return (
            "host memory could not be pinned (page-locked): there is too little, or the system limits it, as WSL does"
        )
    asked = asked_bytes(failure)
    size_told = f" of {size(int(asked))}" if asked is not None else ""
    return f"host memory ran out: an allocation{size_told} was refused"


DIAGNOSES: tuple[Diagnosis, ...] = (HostOomKill(),)
