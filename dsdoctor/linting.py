"""The lint of a ds_config as a whole: what `dsdoctor config --json` prints and `dsdoctor.lint_config` returns."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsdoctor.case import Case
from dsdoctor.diagnoses import diagnose
from dsdoctor.dsconfig import load_config
from dsdoctor.dsconfig.facts import Framework
from dsdoctor.finding import Finding, exit_code
from dsdoctor.machine.versions import installed


@dataclass(frozen=True, kw_only=True)
class ConfigAnalysis:
    """What is wrong with a ds_config; `broken` holds the tracebacks of rules that crashed."""

    case: Case
    findings: tuple[Finding, ...]
    broken: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """1 with a finding of severity error, else 0."""
        return exit_code(self.findings)

    def to_dict(self) -> dict[str, Any]:
        """The JSON document of `dsdoctor config --json`."""
        from dsdoctor.report.document import document

        return document("config", exit_code=self.exit_code, findings=self.findings)


def lint_config(
    config: str | os.PathLike[str] | Mapping[str, Any],
    *,
    world_size: int | None = None,
    deepspeed_version: str | None = None,
    framework: Framework | None = None,
) -> ConfigAnalysis:
    """Hold a ds_config, given as a file or as a dict, against DeepSpeed's schema and its options against each other.

    `world_size` are the ranks, for the batch sizes; `deepspeed_version` is the release to judge for (default: the
    installed one, else the newest that is known); `framework` is who calls DeepSpeed, where that is known. Raises
    `dsdoctor.dsconfig.ConfigUnreadable` for a file that cannot be read.
    """
    given = config if isinstance(config, Mapping) else Path(config)
    release = (installed("deepspeed") or "") if deepspeed_version is None else deepspeed_version
    return analyze(Case(config=load_config(given, release=release, world_size=world_size, framework=framework)))


def analyze(case: Case) -> ConfigAnalysis:
    """Judge what was gathered about a config."""
    diagnosed = diagnose(case)
    return ConfigAnalysis(case=case, findings=diagnosed.findings, broken=diagnosed.broken)
