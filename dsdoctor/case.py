"""Everything that is known of one job: what the collectors gathered and the rules look at.

Each part is optional: `dsdoctor log` fills `logs`, `dsdoctor config` fills `config`, triage fills most of them. Where a
fact can come from a log and from a run of our own alike, a rule asks `dsdoctor.diagnoses.context`.
"""

from __future__ import annotations

from dataclasses import dataclass

from dsdoctor.blame.facts import Bisection
from dsdoctor.comm.facts import CommFacts
from dsdoctor.dsconfig.facts import ConfigFacts
from dsdoctor.finding import FirstBad
from dsdoctor.logs.facts import LogFacts
from dsdoctor.machine.facts import MachineFacts
from dsdoctor.memory.facts import MemoryFacts
from dsdoctor.model_config import ModelConfig
from dsdoctor.numerics.examined import Examined
from dsdoctor.numerics.headroom import ModulePeaks
from dsdoctor.numerics.underflow import Underflow
from dsdoctor.runs.facts import Run
from dsdoctor.scripts.facts import ScriptFacts


@dataclass(frozen=True, kw_only=True)
class Case:
    """The facts of one job."""

    config: ConfigFacts | None = None
    machine: MachineFacts | None = None
    comm: CommFacts | None = None
    memory: MemoryFacts | None = None
    script: ScriptFacts | None = None
    model: ModelConfig | None = None
    runs: tuple[Run, ...] = ()
    logs: LogFacts | None = None
    bisection: Bisection | None = None
    headroom: tuple[ModulePeaks, ...] = ()
    underflow: Underflow | None = None
    """What the detector measured on one rank, where it ran: values by module, gradients that were flushed to zero."""

    def run(self, leg: str) -> Run | None:
        """The run of that leg, or None where it was not made."""
        return next((run for run in self.runs if run.leg == leg), None)

    @property
    def first_bad(self) -> FirstBad | None:
        """The first non-finite value that the detector named, None where it did not run or saw none."""
        run = self.run("numerics")
        return run.first_bad if run is not None else None

    @property
    def examined(self) -> Examined | None:
        """What running the batch of that value again showed."""
        run = self.run("numerics")
        return run.examined if run is not None else None
