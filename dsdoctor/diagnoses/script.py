"""Scripts that give DeepSpeed nothing to do, and scripts that never do the same twice."""

from __future__ import annotations

from collections.abc import Iterator

from dsdoctor.blame.compare import Comparison, compare, nondeterministic
from dsdoctor.blame.health import judge
from dsdoctor.case import Case
from dsdoctor.diagnoses.base import Diagnosis
from dsdoctor.finding import Evidence, Finding, Fix
from dsdoctor.runs.facts import Run


class NoEngine(Diagnosis):
    """The script ended by itself, without an error, and never handed a model to DeepSpeed.

    What proves it: every rank finished with exit code 0 and none called `deepspeed.initialize`, directly or through
    Hugging Face's Trainer, Accelerate or Lightning.

    When it could be wrong: a script that starts its training in processes of its own is not followed into them.

    What to do: pass the arguments that switch DeepSpeed on after `--`, for instance
    `dsdoctor triage ds_config.json train.py -- --deepspeed ds_config.json`. Accelerate leaves DeepSpeed out, without a
    word, where `Accelerator(cpu=True)` or ACCELERATE_USE_CPU is set.
    """

    id = "script/no-engine"
    severity = "error"
    title = "the script never uses DeepSpeed"

    def examine(self, case: Case) -> Iterator[Finding]:
        run = _first_run(case)
        if run is None or run.outcome != "finished" or any(rank.called_engine for rank in run.ranks):
            return
        yield self.finding(
            cause="the script ended without an error and never handed a model to DeepSpeed",
            evidence=(
                Evidence(source=run.leg, text=f"{run.world_size} ranks finished, none called deepspeed.initialize"),
            ),
            confidence=0.9,
            caveat="Training that the script starts in processes of its own is not seen.",
            fixes=(Fix(text="pass the script's arguments that switch DeepSpeed on after --"),),
        )


class ExitedEarly(Diagnosis):
    """The script ended itself with an exit code that is not 0, without an exception.

    What proves it: a rank called `sys.exit` (or argparse did, with code 2 and a usage text) and no rank raised.

    When it could be wrong: a script that ends so on purpose, after all its work, with a code of its own.

    What to do: read what it printed last. Exit code 2 with a usage text means that its arguments, which go after `--`,
    are not right; any other code is one that the script chose: look for `sys.exit`, `os._exit` or `exit(` in it.
    """

    id = "script/exited"
    severity = "error"
    title = "the script ended itself with an error code"

    def examine(self, case: Case) -> Iterator[Finding]:
        run = _first_run(case)
        if run is None or run.outcome != "exited":
            return
        rank = next((r for r in run.ranks if r.exit_code not in (None, 0) and r.failure is None), run.ranks[0])
        refused = rank.exit_code == _USAGE
        usage = " (what argparse does when it does not understand the arguments)" if refused else ""
        yield self.finding(
            cause=f"rank {rank.rank} ended itself with exit code {rank.exit_code}{usage}",
            evidence=(Evidence(source=run.leg, rank=rank.rank, text=run.why or f"exit code {rank.exit_code}"),),
            confidence=0.8,
            fixes=(_ARGUMENTS if refused else _OWN_CODE,),
        )


_USAGE = 2
"""The exit code of argparse for arguments that it refuses."""
_ARGUMENTS = Fix(text="pass the script's own arguments after --, as you start it by hand")
_OWN_CODE = Fix(text="read what it printed last, and see where the script calls sys.exit (or os._exit) with that code")


class Nondeterministic(Diagnosis):
    """The script without DeepSpeed, run twice, does not agree with itself.

    What it is: random numbers that no seed holds (data order, dropout, augmentation in workers), kernels that add up
    in an order of their own, or data that changes between the runs. A difference between the run with DeepSpeed and the
    run without it then proves little, and a failure may come in one run and not in the next.

    What proves it: the same leg made twice, with the same seed: its losses move apart by more than rounding explains
    in several steps in a row, or one of the two runs fails and the other does not.

    When it could be wrong: a run that another process disturbed (a time-out, a full machine) differs for that reason.

    What to do: `--seed 1` seeds Python, NumPy and torch before the script starts; a script that sets seeds later, or
    shuffles in workers, needs a generator of its own (`DataLoader(generator=…, worker_init_fn=…)`). For kernels
    `torch.use_deterministic_algorithms(True)` and `CUBLAS_WORKSPACE_CONFIG=:4096:8`.
    """

    id = "script/nondeterministic"
    severity = "warning"
    title = "the script does not agree with itself"

    def examine(self, case: Case) -> Iterator[Finding]:
        plain, again = case.run("without-deepspeed"), case.run("repeat")
        if plain is None or again is None or not nondeterministic(case):
            return
        failed = [run for run in (plain, again) if judge(run).failed]
        if len(failed) == 1:
            cause = "of two runs without DeepSpeed, made in the same way, one fails and the other does not"
            text = judge(failed[0]).why
        else:
            difference = compare(again, plain)
            cause = f"two runs without DeepSpeed, made in the same way, move apart from step {difference.apart_from} on"
            text = _largest(difference)
        yield self.finding(
            cause=f"{cause}: a difference to the run with DeepSpeed proves little",
            evidence=(Evidence(source=again.leg, step=compare(again, plain).at_step, text=text),),
            confidence=0.85,
            fixes=(
                Fix(text="seed it: --seed 1, and a generator and worker_init_fn for a DataLoader that shuffles"),
                Fix(text="torch.use_deterministic_algorithms(True) with CUBLAS_WORKSPACE_CONFIG=:4096:8"),
            ),
        )


def _largest(difference: Comparison) -> str:
    return f"the losses differ by up to {difference.largest_difference:.1%} (step {difference.at_step})"


def _first_run(case: Case) -> Run | None:
    return case.run("with-deepspeed") or case.run("probe")


DIAGNOSES: tuple[Diagnosis, ...] = (NoEngine(), ExitedEarly(), Nondeterministic())
