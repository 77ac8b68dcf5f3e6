"""The memory of a job as a whole: what `dsdoctor memory` prints and `dsdoctor.estimate_memory` returns."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dsdoctor.case import Case
from dsdoctor.diagnoses import diagnose
from dsdoctor.dsconfig import load_data
from dsdoctor.finding import Finding, exit_code
from dsdoctor.machine import quick
from dsdoctor.machine.described import described, gpus
from dsdoctor.machine.facts import MachineFacts
from dsdoctor.memory.divides import check
from dsdoctor.memory.estimate import Use, estimate
from dsdoctor.memory.facts import MemoryFacts
from dsdoctor.memory.inventory import Inventory, of_number
from dsdoctor.memory.sources import inventory_of
from dsdoctor.runs.facts import ModelFacts

RANKS_ON_A_CPU = 2


@dataclass(frozen=True, kw_only=True)
class MemoryAnalysis:
    """What a job needs, what that means, and the machine it was held against."""

    memory: MemoryFacts
    machine: MachineFacts
    findings: tuple[Finding, ...]
    broken: tuple[str, ...] = ()
    """Tracebacks of rules that crashed."""

    @property
    def exit_code(self) -> int:
        """1 with a finding of severity error, else 0."""
        return exit_code(self.findings)

    def to_dict(self) -> dict[str, Any]:
        """The JSON document of `dsdoctor memory --json`."""
        from dsdoctor.report.document import document

        return document(
            "memory",
            exit_code=self.exit_code,
            findings=self.findings,
            environment=self.machine.to_dict(),
            extra=self.memory.to_dict(),
        )


def estimate_memory(
    config: str | os.PathLike[str] | Mapping[str, Any],
    model: Any,
    machine: MachineFacts | str | None = None,
    *,
    nodes: int = 1,
    ranks_per_host: int | None = None,
    use: Use = Use(),  # noqa: B008  frozen
) -> MemoryAnalysis:
    """What a model under a ds_config needs of each GPU, host and disk, and the cheapest config that fits.

    `model` is a live `torch.nn.Module`, a number of parameters, what `--model` takes (a path, or the id of a model in
    the hub's cache), or an `Inventory`. `machine` is None for this one, or the GPUs of a host in words ("8xA100-80G").
    Raises ConfigUnreadable, `sources.ModelUnknown`, `described.NotUnderstood`, `divides.DoesNotDivide`, ValueError.
    """
    data = dict(config) if isinstance(config, Mapping) else load_data(os.fspath(config))
    known = _machine(machine, data, use)
    each = ranks_per_host or len(known.devices) or RANKS_ON_A_CPU
    return analyze(data, _inventory(model), known, ranks_per_host=each, nodes=nodes, use=use)


def analyze(
    config: Mapping[str, Any],
    model: Inventory | ModelFacts,
    machine: MachineFacts,
    *,
    ranks_per_host: int,
    nodes: int = 1,
    use: Use = Use(),  # noqa: B008  frozen
) -> MemoryAnalysis:
    """The same from facts alone. Raises `divides.DoesNotDivide`."""
    check(config, ranks_per_host * nodes)
    facts = estimate(
        config,
        model,
        machine,
        nproc_per_node=ranks_per_host,
        nodes=nodes,
        device="cuda" if machine.devices else "cpu",
        use=use,
    )
    diagnosed = diagnose(Case(memory=facts))
    return MemoryAnalysis(memory=facts, machine=machine, findings=diagnosed.findings, broken=diagnosed.broken)


def _machine(machine: MachineFacts | str | None, config: Mapping[str, Any], use: Use) -> MachineFacts:
    if isinstance(machine, MachineFacts):
        return machine
    found = quick.here(config, save_dir=use.save_dir)
    if machine is not None:
        found = described(MachineFacts(disks=found.disks), devices=gpus(machine))
    return quick.with_release(found, None)


def _inventory(model: Any) -> Inventory | ModelFacts:
    if isinstance(model, (Inventory, ModelFacts)):
        return model
    if isinstance(model, (str, os.PathLike)):
        return inventory_of(os.fspath(model))
    if isinstance(model, (int, float)):
        return of_number(int(model))
    from dsdoctor.memory.module import of_module

    return of_module(model)
