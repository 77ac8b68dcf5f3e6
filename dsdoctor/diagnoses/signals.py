"""Processes that a signal ended: what the signal means, and what says who sent it."""

from __future__ import annotations

import signal
from collections.abc import Iterator

from dsdoctor.case import Case
from dsdoctor.diagnoses import context
from dsdoctor.diagnoses.base import Diagnosis
from dsdoctor.diagnoses.explained import has_specific_root
from dsdoctor.diagnoses.forms import MAX_EVIDENCE, Form
from dsdoctor.diagnoses.network import NcclError
from dsdoctor.diagnoses.peers import is_peer_failure, raised_itself, roots
from dsdoctor.diagnoses.processes import (
    ABORT,
    KILL,
    SEGMENTATION_FAULT,
    after_the_work,
    endings,
    memory_verdict,
)
from dsdoctor.finding import Evidence, Finding, Fix

_WORKER = "DataLoader worker .* is killed by signal: {}"
_NATIVE_STACK = Fix(text="run it with python -X faulthandler (or under gdb) to see the native stack at that moment")
_BELONG = Fix(text="check that torch, CUDA and compiled extensions belong together; rebuild the extensions")


class Killed(Diagnosis):
    """A process was killed with SIGKILL, and not for lack of memory.

    What it is: exit code -9 (137 in a shell or container; the `deepspeed` command then exits with 247). Somebody sent
    the signal: a scheduler, a watchdog, a person, or the script itself.

    What proves it: the kernel's and the cgroup's counters of out-of-memory kills did not move while the process died,
    and memory was left.

    When it could be wrong: a log alone cannot tell this from the out-of-memory killer, which is then the likelier
    reading; the counters may not be readable in a container.

    What to do: ask who sent it: the scheduler (`sacct -j JOB --format=State,ExitCode,Reason`), a monitoring script, an
    earlier `pkill`, or `kill` in the script itself. `auditctl -a always,exit -S kill -F a1=9` records who sends the
    next one.
    """

    id = "launch/killed"
    severity = "error"
    title = "a process was killed with SIGKILL, and memory was left"

    def examine(self, case: Case) -> Iterator[Finding]:
        killed = roots(case, KILL)
        run = context.own_run(case)
        verdict = memory_verdict(run) if run is not None else None
        if not killed or run is None or verdict is None or verdict.out_of_memory:
            return
        yield self.finding(
            cause=f"{killed[0].who} was killed with SIGKILL (-9), and not by the out-of-memory killer",
            evidence=(killed[0].evidence, Evidence(source=run.leg, text=verdict.text)),
            confidence=verdict.confidence,
            caveat=None if verdict.confidence > 0.6 else "The counters of this machine may not show every kill.",
            fixes=(Fix(text="find out who sent the signal: the scheduler, a watchdog, a person or the script itself"),),
        )


class SegmentationFault(Diagnosis):
    """A process died of a segmentation fault (signal 11).

    What it is: native code used an address that is not its own: an extension built for other versions, a driver, a
    broken library.

    What proves it: exit code -11 (139 in a shell; 245 from the `deepspeed` command), the words "Segmentation fault" of
    the shell, srun, mpirun or Python's fault handler, or torch's message about a worker of the data loader; not after
    another rank's failure.

    When it could be wrong: a process that crashes while it is being stopped is only a consequence. The launcher's
    summary names the process, but a crash in a library that all ranks share shows on whichever rank came first.

    What to do: run with `python -X faulthandler` (or gdb) for the native stack; check that torch, CUDA and the compiled
    ops belong together (`dsdoctor env`), and build the ops anew in a folder of their own (`TORCH_EXTENSIONS_DIR`).
    """

    id = "launch/segfault"
    severity = "error"
    title = "a process died of a segmentation fault"

    def examine(self, case: Case) -> Iterator[Finding]:
        workers = _of_workers(case, "Segmentation fault")
        crashed = [] if workers else roots(case, SEGMENTATION_FAULT)
        if workers or crashed:
            who = "a worker of the data loader" if workers else crashed[0].who
            yield self.finding(
                cause=f"{who} died of a segmentation fault (signal 11)",
                evidence=(*workers, *(ending.evidence for ending in crashed))[:MAX_EVIDENCE],
                confidence=0.9,
                fixes=(_NATIVE_STACK, _IN_PROCESS if workers else _BELONG),
            )


class Abort(Diagnosis):
    """A process ended itself with SIGABRT (signal 6), and neither Python nor a rule says why.

    What it is: native code called `abort()`. glibc does so when it finds the heap damaged ("double free or
    corruption", "free(): invalid pointer"), C++ when nothing catches an exception ("terminate called"), and a library
    when an assertion of its own fails. Python shows no traceback, and the other ranks report a lost connection.

    What proves it: exit code -6 (134 in a shell or container, 250 from the `deepspeed` command), or the words of glibc
    or C++. The rank that aborts is the root, the ranks that lose their connection to it follow.

    When it could be wrong: NCCL's watchdog ends its process by SIGABRT too, after it has printed why (a timeout, an
    error of CUDA): where these lines are in the log, the diagnosis is theirs. gloo sometimes aborts when the
    interpreter ends and all work is done, which is harmless and only noted.

    What to do: read what the process printed last. `python -X faulthandler` prints where Python stood, gdb or a core
    dump (`ulimit -c unlimited`) where the native code did. A damaged heap is mostly an extension built for another
    torch or another compiler: rebuild it; leave extensions out one by one.
    """

    id = "launch/abort"
    severity = "error"
    title = "a process aborted (SIGABRT)"

    def examine(self, case: Case) -> Iterator[Finding]:
        aborted = [ending for ending in endings(case) if ending.code == ABORT and not ending.by_launcher]
        words = _abort_words(case)
        workers = _of_workers(case, "Aborted")
        if not (aborted or words or workers) or (not workers and raised_itself(case)):
            return
        if has_specific_root(case) or any(NcclError().examine(case)):
            return
        proof = (*words, *(ending.evidence for ending in aborted), *workers)[:MAX_EVIDENCE]
        if after_the_work(case):
            yield self._after_the_work(proof)
            return
        ranks = [one.rank for one in (*(ending.evidence for ending in aborted), *words) if one.rank is not None]
        who = next((ending.who for ending in aborted), "a worker of the data loader" if workers else "a process")
        who = f"rank {ranks[0]}" if who == "a process" and ranks else who
        why = f": {words[0].text.strip()}" if words else ""
        yield self.finding(
            cause=f"{who} aborted (signal 6){why}",
            evidence=proof,
            confidence=0.85 if words and aborted else 0.75 if workers else 0.6 if aborted else 0.5,
            caveat=None
            if words or workers
            else "NCCL's watchdog ends its process in the same way; its lines may be cut off here.",
            fixes=(_NATIVE_STACK, _BELONG),
        )

    def _after_the_work(self, proof: tuple[Evidence, ...]) -> Finding:
        return self.finding(
            severity="info",
            title="a process aborted after its work was done",
            cause="a process aborted while it was ending, after training had been done",
            evidence=proof,
            confidence=0.8,
            fixes=(Fix(text="call torch.distributed.destroy_process_group() at the end; nothing is lost without it"),),
        )


class OtherSignal(Diagnosis):
    """A process was ended by a signal that has no page of its own.

    What it is: signal 4 (SIGILL) is an instruction that this CPU does not have, from an extension or a wheel built for
    a newer one. Signal 8 (SIGFPE) is a division by zero in native code. Signal 24 (SIGXCPU) is a limit of CPU time,
    signal 25 (SIGXFSZ) one of file size. Signal 5 (SIGTRAP) is a breakpoint, or a check in compiled code. Signals 10
    and 12 (SIGUSR1, SIGUSR2) are what schedulers send before they end a job.

    What proves it: the exit code, -N (128 + N in a shell; 256 - N from the `deepspeed` command), not after another
    rank's failure.

    When it could be wrong: the code says which signal, not who sent it.

    What to do: for SIGILL build the extension on this machine (`DS_BUILD_...`, `-march=native` only where it runs); for
    limits see `ulimit -a` and the scheduler's; for SIGUSR1 handle it (checkpoint and requeue) or ask for more time.
    """

    id = "launch/signal"
    severity = "error"
    title = "a process was ended by a signal"

    def examine(self, case: Case) -> Iterator[Finding]:
        if raised_itself(case):
            return
        ended = [e for e in endings(case) if e.code < 0 and -e.code not in _WITH_A_PAGE and not e.by_launcher]
        if not ended or has_specific_root(case):
            return
        number = -ended[0].code
        meaning, remedy = _MEANINGS.get(number, ("who sent it is not in the log", "find out who sent the signal"))
        yield self.finding(
            cause=f"{ended[0].who} was ended by signal {number} ({_name(number)}): {meaning}",
            evidence=tuple(ending.evidence for ending in ended[:MAX_EVIDENCE]),
            confidence=0.8,
            fixes=(Fix(text=remedy), _NATIVE_STACK),
        )


_IN_PROCESS = Fix(text="load the data in the main process (num_workers=0) to see where it crashes; check its libraries")
_WITH_A_PAGE = {
    signal.SIGKILL,
    signal.SIGSEGV,
    signal.SIGBUS,
    signal.SIGABRT,
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
}
_LIMIT = "raise the limit (ulimit, the scheduler's), or write checkpoints and resume"
_MEANINGS: dict[int, tuple[str, str]] = {
    signal.SIGILL: (
        "an instruction that this CPU does not have, from an extension or a wheel built for a newer one",
        "build the extension on this machine, with an empty TORCH_EXTENSIONS_DIR; install wheels made for this CPU",
    ),
    signal.SIGFPE: (
        "a division by zero in native code",
        "look for a size of zero that an extension is given (an empty batch, no tokens for an expert)",
    ),
    signal.SIGTRAP: ("a breakpoint or a failed check in compiled code", "update the library that the stack names"),
    signal.SIGXCPU: ("the limit of CPU time was reached", _LIMIT),
    signal.SIGXFSZ: ("the limit of file size was reached", _LIMIT),
    signal.SIGUSR1: (
        "schedulers send it before they end a job",
        "handle it (checkpoint, requeue), or ask for more time",
    ),
    signal.SIGUSR2: (
        "schedulers send it before they end a job",
        "handle it (checkpoint, requeue), or ask for more time",
    ),
}


def _name(number: int) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else "no signal of this system"


def _of_workers(case: Case, word: str) -> tuple[Evidence, ...]:
    """Exceptions about a worker of the data loader that a signal ended, unless another exception came first."""
    form = Form(message=_WORKER.format(word))
    first = next((failure for failure in context.failures(case) if not is_peer_failure(failure)), None)
    return (context.evidence(first),) if first is not None and form.match(first) is not None else ()


def _abort_words(case: Case) -> tuple[Evidence, ...]:
    """What the C library and C++ said of it: the exception itself before the line that announces it."""
    if case.logs is None:
        return ()
    raised = [event for event in case.logs.of_kind("native-error") if not event.fields["error"].startswith("[PG")]
    return tuple(event.evidence() for event in (*raised, *case.logs.of_kind("abort-reason")))


DIAGNOSES: tuple[Diagnosis, ...] = (Killed(), SegmentationFault(), Abort(), OtherSignal())
