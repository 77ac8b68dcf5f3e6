"""Optimizers of the ds_config that ZeRO does not take."""

from __future__ import annotations

from collections.abc import Iterator

from dsdoctor.case import Case
from dsdoctor.diagnoses.base import Diagnosis
from dsdoctor.diagnoses.config_conflict_zero import ONE_BIT
from dsdoctor.diagnoses.config_evidence import at_key, matching, raised
from dsdoctor.dsconfig.effective import Effective
from dsdoctor.dsconfig.facts import ConfigFacts
from dsdoctor.finding import Evidence, Finding, Fix

_STAGE = "zero_optimization.stage"
_SUPPORTED = ("adam", "adamw", "adagrad", "lion", "muon")
"""Names whose class stands in DeepSpeed's ZERO_SUPPORTED_OPTIMIZERS."""


class UntestedOptimizer(Diagnosis):
    """An optimizer that is not on ZeRO's list.

    ZeRO takes torch's Adam, AdamW and Adagrad, DeepSpeed's own fused and CPU optimizers, and Muon, by their exact
    class; a subclass counts as another class. Anything else raises, unless `zero_allow_untested_optimizer` is true.

    What proves it: the optimizer's name in the config with a stage above 0, or DeepSpeed's assertion.

    When it could be wrong: a script that passes its own optimizer to `deepspeed.initialize` does not use the config's.
    Optimizers that work element by element are safe with ZeRO; ones that look at whole tensors (LAMB, Adafactor,
    Shampoo) see only their slice, and their results are wrong.

    What to do: a supported optimizer; or set the key, for an optimizer that works element by element.
    """

    id = "config/untested-optimizer"
    severity = "error"
    title = "an optimizer that ZeRO does not know"

    def examine(self, case: Case) -> Iterator[Finding]:
        config = case.config
        exceptions = tuple(raised(f) for f, _ in matching(case, r"You are using an untested ZeRO Optimizer"))
        name = _untested(config) if config is not None else None
        if not exceptions and name is None:
            return
        evidence: list[Evidence] = list(exceptions)
        if config is not None:
            evidence += [at_key(config, key) for key in ("optimizer.type", _STAGE) if config.has(key)]
        allow = "zero_allow_untested_optimizer"
        yield self.finding(
            cause=f"{name or 'the optimizer that the script passes'} is not on ZeRO's list of supported optimizers",
            evidence=tuple(evidence),
            confidence=0.98 if exceptions else 0.9,
            caveat=None if exceptions else "Not if the script passes its own optimizer to deepspeed.initialize.",
            fixes=(
                Fix(text=f"set {allow}, if the optimizer works element by element", patch={allow: True}),
                Fix(text="or use AdamW"),
            ),
            keys=(allow, "optimizer.type") if name else (allow,),
        )


def _untested(config: ConfigFacts) -> str | None:
    """The name of the config's optimizer if ZeRO refuses it, else None."""
    effective = Effective.of(config)
    name = config.value("optimizer.type")
    if effective.stage == 0 or not isinstance(name, str) or effective.get("zero_allow_untested_optimizer"):
        return None
    built_by_deepspeed = name.lower() in effective.schema.optimizer_names
    if name.lower() in (*_SUPPORTED, *ONE_BIT) or not (built_by_deepspeed or name in effective.schema.torch_optimizers):
        return None
    return name


DIAGNOSES: tuple[Diagnosis, ...] = (UntestedOptimizer(),)
