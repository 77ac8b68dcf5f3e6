"""How processes were started and how they ended, and the exception that ended the first of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from dsdoctor.case import Case
from dsdoctor.diagnoses import context
from dsdoctor.diagnoses.base import Diagnosis
from dsdoctor.diagnoses.explained import explained, has_specific_root, holds
from dsdoctor.diagnoses.forms import MAX_EVIDENCE, Form, TextDiagnosis, users_lines
from dsdoctor.diagnoses.internal import InternalError
from dsdoctor.diagnoses.peers import is_peer_failure, roots
from dsdoctor.diagnoses.processes import KILL, SEGMENTATION_FAULT, endings, memory_verdict, signal_code
from dsdoctor.diagnoses.watchdog import timeouts_as_evidence
from dsdoctor.finding import Evidence, Finding, Fix
from dsdoctor.frames import users_line
from dsdoctor.runs.facts import Failure


class UserException(Diagnosis):
    """A rank's own Python exception ended the job.

    What it is: the script (or what it calls) raised, and nothing more specific is known about that exception. The
    launcher then stops the other ranks and prints a summary that hides it.

    What proves it: the first traceback of a rank that is no answer to the loss of another rank.

    When it could be wrong: where several ranks raise at nearly the same time, the first in the log need not be the
    first in time. The launcher's "Root Cause" and the `--local_rank=N` in its last line do not settle it: the former
    goes by the order of polling, the latter names the rank that was started last.

    What to do: read that exception, at the line of your code that it came through.
    """

    id = "launch/user-exception"
    severity = "error"
    title = "a rank raised an exception"

    def examine(self, case: Case) -> Iterator[Finding]:
        own = [failure for failure in context.failures(case) if not is_peer_failure(failure)]
        if not own:
            yield from self._exit_in_log(case)
        elif not explained(own[0], case) and not any(InternalError().examine(case)):
            yield self._raised(own[0], own[1:])

    def _raised(self, first: Failure, others: Sequence[Failure]) -> Finding:
        place = users_line(first.frames) or (first.frames[-1] if first.frames else None)
        where = f" at {place.file}:{place.line} in {place.function}" if place is not None else ""
        said = first.message.strip().splitlines()[0] if first.message.strip() else "(no message)"
        who = f"rank {first.rank}" if first.rank is not None else "the script"
        same = [context.evidence(failure) for failure in others if failure.type == first.type]
        return self.finding(
            cause=f"{who} raised {first.type}: {said}{where}",
            evidence=(context.evidence(first), *users_lines(first), *same)[:MAX_EVIDENCE],
            confidence=0.85 if first.frames else 0.7,
            fixes=(Fix(text=f"mend it{where}" if where else "read the traceback of that rank"),),
        )

    def _exit_in_log(self, case: Case) -> Iterator[Finding]:
        """A launcher reports a process that failed by itself, and the exception is not in the log."""
        if case.logs is None or case.logs.failures or any(signal_code(e.code) < 0 for e in case.logs.exits):
            return
        left = [exit for exit in case.logs.exits if exit.code > 0]
        if left and not has_specific_root(case):
            who = f"rank {left[0].rank}" if left[0].rank is not None else "a process"
            yield self.finding(
                cause=f"{who} ended with exit code {left[0].code}; what it raised is not in this log",
                evidence=(left[0].evidence,),
                confidence=0.4,
                caveat="The traceback of the rank itself is missing; the launcher's report does not say why.",
                fixes=(Fix(text="look for the rank's own output: torchrun --tee 3, or one file a rank"),),
            )


class PeerFailure(Diagnosis):
    """A rank stopped because another one did.

    What it is: when a rank dies, the launcher sends SIGTERM to the others, and collectives that wait for it fail with
    "connection closed by peer" or an abort. None of this is a cause.

    What proves it: such an error, or the launcher's own signal, after another process had ended.

    When it could be wrong: if every rank only says that it lost a peer, the first failing one is not in sight; its node
    or its log is the missing piece.

    What to do: read the first failing rank instead.
    """

    id = "launch/peer-failure"
    severity = "error"
    role = "consequence"
    title = "a rank stopped because another one did"

    def examine(self, case: Case) -> Iterator[Finding]:
        proof = [context.evidence(f) for f in context.failures(case) if is_peer_failure(f)]
        proof += [ending.evidence for ending in endings(case) if ending.by_launcher]
        if case.logs is not None and (case.logs.exits or case.logs.failures):
            proof += [event.evidence() for event in case.logs.of_kind("peer-lost", "closing-signal")]
            proof += timeouts_as_evidence(case)
        if proof:
            yield self.finding(
                cause="ranks stopped only because another one had gone",
                evidence=tuple(proof[:MAX_EVIDENCE]),
                confidence=0.9,
                fixes=(Fix(text="read the first failing rank instead"),),
            )


class Killed(Diagnosis):
    """A process was killed with SIGKILL, and not for lack of memory.

    What it is: exit code -9 (137 in a shell or container; the `deepspeed` command then exits with 247). Somebody sent
    the signal: a scheduler, a watchdog, a person, or the script itself.

    What proves it: the kernel's and the cgroup's counters of out-of-memory kills did not move while the process died,
    and memory was left.

    When it could be wrong: a log alone cannot tell this from the out-of-memory killer, which is then the likelier
    reading; the counters may not be readable in a container.

    What to do: ask who sent it: the scheduler's log, a monitoring script, `kill` in the script itself.
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

    What it is: native code crashed: an extension built for other versions, a driver, a broken library.

    What proves it: exit code -11 (139 in a shell; 245 from the `deepspeed` command), not after another rank's failure.

    When it could be wrong: a process that crashes while it is being stopped is only a consequence.

    What to do: run with `python -X faulthandler` (or gdb) for the native stack; check that torch, CUDA and the compiled
    ops belong together.
    """

    id = "launch/segfault"
    severity = "error"
    title = "a process died of a segmentation fault"

    def examine(self, case: Case) -> Iterator[Finding]:
        crashed = roots(case, SEGMENTATION_FAULT)
        if crashed:
            yield self.finding(
                cause=f"{crashed[0].who} died of a segmentation fault (signal 11)",
                evidence=tuple(ending.evidence for ending in crashed[:MAX_EVIDENCE]),
                confidence=0.9,
                fixes=(
                    Fix(text="run it with python -X faulthandler to see the native stack"),
                    Fix(text="check that torch, CUDA and compiled extensions belong together; rebuild the extensions"),
                ),
            )


class LauncherMissing(TextDiagnosis):
    """The script was started with plain `python`, without a launcher.

    What it is: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT are not all set, so DeepSpeed tries to find
    an MPI environment and misses mpi4py.

    What proves it: the import error of mpi4py in DeepSpeed's MPI discovery, or torch's message about an unset RANK.

    When it could be wrong: a cluster that really starts ranks by mpirun needs mpi4py.

    What to do: start it with `deepspeed`, `torchrun` or `accelerate launch`. Installing mpi4py makes the error go away
    and trains with a world size of 1, silently.
    """

    id = "launch/launcher-missing"
    severity = "error"
    title = "started without a launcher"
    forms = (
        Form(types=("ModuleNotFoundError", "ImportError"), message=r"No module named 'mpi4py'"),
        Form(message=r"DeepSpeed requires the LOCAL_RANK environment variable"),
        Form(
            message=r"environment variable (?:RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT|LOCAL_RANK) expected, but not set"
        ),
        Form(types=("KeyError",), message=r"^'?(?:LOCAL_RANK|RANK|WORLD_SIZE)'?$"),
    )
    cause = (
        "the variables of a launcher (RANK, WORLD_SIZE, LOCAL_RANK, ...) are not set: it was started with plain python"
    )
    fixes = (
        Fix(text="start it with deepspeed, torchrun or accelerate launch"),
        Fix(text="do not install mpi4py for this: it would train with a world size of 1, silently"),
    )


class LocalRankMismatch(TextDiagnosis):
    """The local rank given as an argument and the one in the environment do not agree, or the argument is refused.

    What it is: the `deepspeed` launcher appends `--local_rank=N` to the script's arguments; torchrun only sets
    LOCAL_RANK. A script that parses its arguments strictly ends with exit code 2; one that believes the default 0 of an
    argument of its own disagrees with the environment.

    What proves it: the message of DeepSpeed, or argparse's usage text with `--local_rank`.

    When it could be wrong: it is not.

    What to do: read LOCAL_RANK from the environment, and accept the argument (`parser.add_argument("--local_rank")`) or
    start with `--no_local_rank`.
    """

    id = "launch/local-rank-mismatch"
    severity = "error"
    title = "--local_rank and LOCAL_RANK do not go together"
    forms = (
        Form(message=r"Mismatch in local rank setting"),
        Form(types=("SystemExit", "ArgumentError"), message=r"unrecognized arguments: .*--local[-_]rank"),
    )
    kinds = ("local-rank-refused",)
    cause = "the --local_rank argument of the launcher and the script's own idea of its local rank do not go together"
    fixes = (
        Fix(text="read LOCAL_RANK from the environment and accept --local_rank in the argument parser"),
        Fix(text="or start it with the launcher it was written for: deepspeed passes --local_rank, torchrun does not"),
        Fix(text="or start with deepspeed --no_local_rank, where the script refuses the argument"),
    )


class Hangup(TextDiagnosis):
    """The terminal was closed: the launcher received SIGHUP.

    What it is: torchrun passes the death signal 1 on and stops all ranks. `nohup` alone does not help, since the
    launcher installs its own handler.

    What proves it: "Received 1 death signal" (the 1 is the number of the signal, not a count) or "got signal: 1".

    When it could be wrong: schedulers can send SIGHUP as well.

    What to do: run it inside tmux or screen, as a service, or under a scheduler.
    """

    id = "launch/sighup"
    severity = "error"
    title = "the terminal was closed (SIGHUP)"
    forms = (Form(types=("SignalException",), message=r"got signal: (?:1$|1\b(?!\d)|.*SIGHUP)"),)
    kinds = ("sighup",)
    cause = "the launcher received SIGHUP (signal 1), which is what closing a terminal sends, and stopped all ranks"
    fixes = (Fix(text="start it inside tmux or screen, as a service, or under a scheduler"),)


class Cancelled(TextDiagnosis):
    """The scheduler, or a person, ended the job.

    What it is: a time limit, preemption, `scancel` or Ctrl-C: every rank is stopped at once and nothing failed before.

    What proves it: the scheduler's notice, or SIGTERM/SIGINT received by the launcher itself.

    When it could be wrong: an operator may cancel a job *because* it hangs; then the hang is the cause.

    What to do: a longer limit, or checkpoints and resuming.
    """

    id = "launch/cancelled"
    severity = "error"
    title = "the job was ended from outside"
    forms = (
        Form(types=("SignalException",), message=r"got signal: (?:2|15|.*SIG(?:TERM|INT))\b"),
        Form(types=("KeyboardInterrupt",)),
    )
    kinds = ("cancelled",)
    confidence = 0.8
    cause = "the job was ended from outside: a time limit, preemption, a cancel command or Ctrl-C"
    fixes = (Fix(text="ask for more time, or write checkpoints and resume"),)

    def applies(self, failure: Failure, case: Case) -> bool:
        """Only where nothing else had failed before."""
        first = next((f for f in context.failures(case) if not is_peer_failure(f)), failure)
        return self.matched(first) is not None

    def examine(self, case: Case) -> Iterator[Finding]:
        """Who stops a job that hangs, or seems to, only answers to that."""
        follows = holds(case, "comm/p2p-hang", "hang/slow-not-hung")
        for found in super().examine(case):
            yield replace(found, role="consequence") if follows else found


class SshOrHostfile(TextDiagnosis):
    """The hostfile cannot be used, or a host of it cannot be reached.

    What it is: the `deepspeed` launcher starts the other nodes over ssh/pdsh from a hostfile with lines
    `host slots=N`.

    What proves it: its message, or those of ssh and pdsh.

    When it could be wrong: an exit code of 0 from an old pdsh is no success; a node that was reached and failed later
    is not meant here.

    What to do: `ssh HOST true` must work without a password from the node where you launch; every line of the hostfile
    must read `host slots=N`.
    """

    id = "launch/ssh-or-hostfile"
    severity = "error"
    title = "a host of the hostfile cannot be used"
    forms = (
        Form(message=r"(?i)hostfile .*(?:not formatted correctly|is empty|does not exist|multiple entries|contains)"),
        Form(message=r"(?i)not reachable via ssh|setup passwordless ssh"),
        Form(message=r"launcher '\w+' not installed"),
        Form(message=r"not found in hostfile|No slot '\S+' specified on host|no extra nodes available via hostfile"),
    )
    kinds = ("ssh-failed",)
    cause = "a host of the hostfile cannot be used or reached over ssh"
    fixes = (
        Fix(text="make `ssh HOST true` work without a password for every host, from the node where you launch"),
        Fix(text="write every line of the hostfile as: host slots=N"),
    )


DIAGNOSES: tuple[Diagnosis, ...] = (
    LauncherMissing(),
    LocalRankMismatch(),
    SshOrHostfile(),
    Hangup(),
    Cancelled(),
    UserException(),
    Killed(),
    SegmentationFault(),
    PeerFailure(),
)
