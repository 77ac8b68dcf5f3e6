"""Everything that is known of one job: what the collectors gathered and the rules look at.

Each part is optional: `dsdoctor log` fills `logs`, `dsdoctor config` fills `config`, triage fills most of them. A rule
asks the views below (`failures`, `loss_scales`) where a fact can come from a log and from a run of our own alike, so
that it is written once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dsdoctor.comm.facts import CommFacts
from dsdoctor.dsconfig.facts import ConfigFacts
from dsdoctor.finding import FirstBad
from dsdoctor.logs.facts import LogFacts
from dsdoctor.loss_scale import LossScaleHistory
from dsdoctor.machine.facts import MachineFacts
from dsdoctor.memory.facts import MemoryFacts
from dsdoctor.model_config import ModelConfig
from dsdoctor.runs.facts import Failure, Run
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

    def run(self, leg: str) -> Run | None:
        """The run of that leg, or None where it was not made."""
        return next((run for run in self.runs if run.leg == leg), None)

    @property
    def first_bad(self) -> FirstBad | None:
        """The first non-finite value that the detector named, None where it did not run or saw none."""
        run = self.run("numerics")
        return run.first_bad if run is not None else None

    def failures(self) -> Iterator[Failure]:
        """The exceptions that ended ranks, from the runs and from the logs, oldest first within each source."""
        for run in self.runs:
            yield from run.failures
        if self.logs is not None:
            yield from self.logs.failures

    def loss_scales(self) -> Iterator[LossScaleHistory]:
        """What the loss scale did, one history a run or log."""
        for run in self.runs:
            if run.loss_scale is not None:
                yield run.loss_scale
        if self.logs is not None and self.logs.loss_scale is not None:
            yield self.logs.loss_scale
