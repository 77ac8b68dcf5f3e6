"""Values of the config that DeepSpeed accepts and that no training survives."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from dsdoctor.case import Case
from dsdoctor.diagnoses import context
from dsdoctor.diagnoses.base import Diagnosis
from dsdoctor.dsconfig.facts import ConfigFacts
from dsdoctor.finding import Evidence, Finding, Fix

_SCALED_BY_GRADIENT = ("adam", "lamb", "lion", "adagrad", "rmsprop", "muon", "nadam", "radam", "adamax")
_MOST_ADAPTIVE = 1.0
"""An Adam-like step moves every weight by about the learning rate, and weights of a usual network are below 1."""
_MOST_OTHER = 100.0
_RATE_KEYS = ("optimizer.params.lr", "scheduler.params.warmup_max_lr", "scheduler.params.cycle_max_lr")
_SANE_RATE = 1e-4


class SuspiciousValue(Diagnosis):
    """A learning rate that no usual network survives, such as 3e4 where 3e-4 was meant.

    What proves it: an optimizer of the Adam family moves each weight by about the learning rate in every step, whatever
    the gradient; weights of usual networks are well below 1, so a rate above 1 throws all of them away in one step.
    Other optimizers scale with the gradient; there only a rate above 100 counts.

    When it could be wrong: a model whose parameters live on another scale (coordinates, prices). It is therefore a
    suspicion that a run with a usual rate has to confirm.

    What to do: check the exponent.
    """

    id = "config/suspicious-value"
    severity = "warning"
    title = "a learning rate that no usual network survives"

    def examine(self, case: Case) -> Iterator[Finding]:
        config = case.config
        if config is None:
            return
        for key in _RATE_KEYS:
            rate = _number(config.value(key))
            if rate is not None and rate > _limit(config):
                yield self._suspicion(config, key, rate)

    def _suspicion(self, config: ConfigFacts, key: str, rate: float) -> Finding:
        where = config.where(key)
        return self.finding(
            cause=f"{key} is {rate:g}, which moves every weight by about {rate:g} in one step",
            evidence=(Evidence(source=config.path, line=where.line if where else None, text=f"{key}: {rate:g}"),),
            confidence=0.7,
            caveat="A model whose parameters are themselves that large can need it.",
            fixes=(Fix(text="check the exponent; a usual value is 1e-5 to 1e-3", patch=_patch(key, _SANE_RATE)),),
            keys=(key,),
        )


class RefusedValue(Diagnosis):
    """The optimizer or the scheduler refuses a value that the ds_config gives it.

    What it is: DeepSpeed hands the parameters of the two sections to the constructor of their class, which checks them:
    a beta of 1.5, a negative learning rate.

    What proves it: the ValueError, raised while DeepSpeed builds the optimizer or scheduler out of the config.

    When it could be wrong: "auto" values are filled in from the arguments of the Trainer; then those are what to mend.

    What to do: correct the value.
    """

    id = "config/refused-value"
    severity = "error"
    title = "the optimizer or the scheduler refuses a value of the config"

    def examine(self, case: Case) -> Iterator[Finding]:
        for failure in context.failures(case):
            section = next((s for f in failure.frames if (s := _BUILT_FROM.get(f.function)) is not None), None)
            if section is None or failure.type != "ValueError":
                continue
            key = _named(case.config, section, failure.message)
            yield self.finding(
                cause=f"the {section} refuses what the ds_config gives it: {failure.message.strip()}",
                evidence=(context.evidence(failure), *((_at(case.config, key),) if case.config is not None else ())),
                confidence=0.9,
                fixes=(Fix(text=f"correct {key}"),),
                keys=(key,),
            )
            return


_BUILT_FROM = {"_configure_basic_optimizer": "optimizer", "_scheduler_from_config": "scheduler"}
"""Functions of DeepSpeed's engine that build something from a section of the config."""
_PARAMETER_WORDS = {"learning rate": "lr", "beta": "betas", "epsilon": "eps"}
"""What torch's messages call a parameter, where it is not its name."""


def _named(config: ConfigFacts | None, section: str, message: str) -> str:
    """The dotted key of the parameter that the message speaks of, else of the section's parameters."""
    path = f"{section}.params"
    given = config.value(path) if config is not None else None
    names = list(given) if isinstance(given, dict) else []
    meant = [name for words, name in _PARAMETER_WORDS.items() if words in message]
    named = next((name for name in names if name in meant or re.search(rf"\b{re.escape(str(name))}\b", message)), None)
    return f"{path}.{named}" if named is not None else path


def _at(config: ConfigFacts, key: str) -> Evidence:
    where = config.where(key)
    return Evidence(source=config.path, line=where.line if where else None, text=f"{key}: {config.value(key)}")


def _limit(config: ConfigFacts) -> float:
    kind = str(config.value("optimizer.type", "adamw")).lower()
    return _MOST_ADAPTIVE if any(name in kind for name in _SCALED_BY_GRADIENT) else _MOST_OTHER


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _patch(key: str, value: Any) -> dict[str, Any]:
    """The merge patch that sets one dotted key."""
    patch: Any = value
    for part in reversed(key.split(".")):
        patch = {part: patch}
    return dict(patch)


DIAGNOSES: tuple[Diagnosis, ...] = (SuspiciousValue(), RefusedValue())
