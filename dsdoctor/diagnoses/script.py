"""Scripts that give DeepSpeed nothing to do."""

from __future__ import annotations

from collections.abc import Iterator

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
    `dsdoctor triage ds_config.json train.py -- --deepspeed ds_config.json`.
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

    What to do: read what it printed last; a usage text means that its arguments, which go after `--`, are not right.
    """

    id = "script/exited"
    severity = "error"
    title = "the script ended itself with an error code"

    def examine(self, case: Case) -> Iterator[Finding]:
        run = _first_run(case)
        if run is None or run.outcome != "exited":
            return
        rank = next((r for r in run.ranks if r.exit_code not in (None, 0) and r.failure is None), run.ranks[0])
        usage = " (what argparse does when it does not understand the arguments)" if rank.exit_code == 2 else ""
        yield self.finding(
            cause=f"rank {rank.rank} ended itself with exit code {rank.exit_code}{usage}",
            evidence=(Evidence(source=run.leg, rank=rank.rank, text=run.why or f"exit code {rank.exit_code}"),),
            confidence=0.8,
            fixes=(Fix(text="pass the script's own arguments after --, as you start it by hand"),),
        )


def _first_run(case: Case) -> Run | None:
    return case.run("with-deepspeed") or case.run("probe")


DIAGNOSES: tuple[Diagnosis, ...] = (NoEngine(), ExitedEarly())
