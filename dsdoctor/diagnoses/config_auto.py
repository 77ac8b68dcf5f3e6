""" "auto" in the ds_config where nobody replaces it by a value."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dsdoctor.case import Case
from dsdoctor.diagnoses import before_run_model
from dsdoctor.diagnoses.base import Diagnosis
from dsdoctor.diagnoses.config_evidence import RESOLVERS, as_json, as_list, at_key, everyone, raised
from dsdoctor.diagnoses.config_keys import refused_autos
from dsdoctor.dsconfig import batch, keys, patch
from dsdoctor.dsconfig.facts import ConfigFacts
from dsdoctor.dsconfig.schema import Schema, schema_for
from dsdoctor.finding import Evidence, Finding, Fix, Severity
from dsdoctor.runs.facts import Failure

_ZERO = "zero_optimization"
_BOTH = (
    *batch.KEYS,
    "gradient_clipping",
    "steps_per_print",
    "fp16.enabled",
    "bf16.enabled",
    f"{_ZERO}.stage",
    f"{_ZERO}.offload_optimizer.device",
    f"{_ZERO}.offload_optimizer.nvme_path",
    f"{_ZERO}.offload_param.device",
    f"{_ZERO}.offload_param.nvme_path",
    f"{_ZERO}.stage3_gather_16bit_weights_on_model_save",
    f"{_ZERO}.reduce_bucket_size",
    f"{_ZERO}.stage3_prefetch_bucket_size",
    f"{_ZERO}.stage3_param_persistence_threshold",
    "optimizer.params.lr",
    "optimizer.params.weight_decay",
    "scheduler.params.warmup_min_lr",
    "scheduler.params.warmup_max_lr",
    "scheduler.params.warmup_num_steps",
    "scheduler.params.total_num_steps",
)
_RESOLVED = {
    "accelerate": frozenset(_BOTH),
    "transformers": frozenset((*_BOTH, "optimizer.params.betas", "optimizer.params.eps")),
}
"""What `accelerate.utils.DeepSpeedPlugin` and `transformers.integrations.deepspeed` fill in, or write themselves."""

_STRING_ARITHMETIC = r"not supported between instances of .*'str'|unsupported operand type\(s\) for .*'str'"
_NOT_IN_KWARGS = r"`([\w.]+)` not found in kwargs\. Please specify `[\w.]+` without `auto`"
_SWITCHES = ("fp16.enabled", "bf16.enabled", f"{_ZERO}.stage")


@dataclass(frozen=True, kw_only=True)
class _Auto:
    """One "auto" that stays, and what it does then."""

    key: str
    effect: str
    severity: Severity
    replacement: Any = None


class AutoUnresolved(Diagnosis):
    """ "auto" in a ds_config that nobody replaces by a value.

    Transformers' Trainer and Accelerate fill in a fixed list of keys; `deepspeed.initialize` and Lightning fill in
    nothing. In DeepSpeed's typed sections (zero_optimization, fp16, bf16) "auto" then counts as not given, so that
    `bf16.enabled: "auto"` trains in fp32 without a word; elsewhere it reaches arithmetic and raises a TypeError, for
    `gradient_clipping` at the first step.

    What proves it: the config with the framework that hands it over, or the TypeError on a text from DeepSpeed's code.

    When it could be wrong: a script that fills the values in itself before it calls `deepspeed.initialize`. From an
    exception alone a number in quotes ("1.0") looks the same. Where the framework is not known, this is a note only.

    What to do: write the value; without the key DeepSpeed takes its default.
    """

    id = "config/auto-unresolved"
    severity = "error"
    title = '"auto" that nobody resolves'

    def examine(self, case: Case) -> Iterator[Finding]:
        config = case.config
        exceptions = [(failure, key) for failure in everyone(case) for key in [_key_of(failure)] if key is not None]
        autos = _unresolved(config) if config is not None else []
        if config is not None and (autos or config.data):
            exceptions = [(f, key) for f, key in exceptions if not _written_otherwise(config, key)]
        if config is not None:
            yield from before_run_model.no_hidden_size(self, case)
        if config is not None and autos:
            yield self._from_config(config, autos, exceptions)
        elif exceptions:
            yield self._from_exception(exceptions)
        elif refused := refused_autos(case):
            yield self.finding(
                cause=f'DeepSpeed refuses "auto" for {as_list(list(refused))}: nobody has filled it in',
                evidence=tuple(dict.fromkeys(refused.values())),
                confidence=0.9,
                fixes=(Fix(text=f"write a number for {as_list(list(refused))}, or drop it for the default"),),
                keys=tuple(refused),
            )

    def _from_config(self, config: ConfigFacts, autos: list[_Auto], exceptions: list[tuple[Failure, str]]) -> Finding:
        failing = {key for _failure, key in exceptions}
        autos = sorted(autos, key=lambda a: (a.key not in failing, a.severity != "error"))
        unknown = config.framework is None and not exceptions
        worst: Severity = "error" if any(auto.severity == "error" for auto in autos) else "warning"
        names = [auto.key for auto in autos]
        who = "Hugging Face's code does not fill in" if config.framework in RESOLVERS else "nobody fills in"
        return self.finding(
            severity="info" if unknown else worst,
            cause=f'{who} "auto" for {as_list(names[:6])}: {autos[0].effect}',
            evidence=(
                *_once(exceptions),
                *(at_key(config, auto.key, f'{auto.key}: "auto": {auto.effect}') for auto in autos),
            ),
            confidence=0.3 if unknown else 0.95,
            caveat="Fine if Transformers' Trainer or Accelerate hands this config to DeepSpeed." if unknown else None,
            fixes=(_fix(autos),),
            keys=tuple(names),
        )

    def _from_exception(self, exceptions: list[tuple[Failure, str]]) -> Finding:
        key = exceptions[0][1]
        return self.finding(
            cause=f'{key} reached DeepSpeed\'s arithmetic as a text, most likely "auto"',
            evidence=_once(exceptions),
            confidence=0.8,
            caveat="A number in quotes gives the same exception.",
            fixes=(Fix(text=f"write {key} as a number, or let Transformers or Accelerate fill it in"),),
            keys=(key,),
        )


def _once(exceptions: list[tuple[Failure, str]]) -> tuple[Evidence, ...]:
    """One piece of evidence a message."""
    return tuple({failure.message: raised(failure) for failure, _key in reversed(exceptions)}.values())


def _written_otherwise(config: ConfigFacts, key: str) -> bool:
    """The config gives that key a value that is not "auto": then "auto" is not what the exception is about."""
    if key in batch.KEYS:
        return not any(config.value(name) == "auto" for name in batch.KEYS)
    value = config.value(key)
    return not (value == "auto" or (isinstance(value, dict) and "auto" in value.values()))


def _key_of(failure: Failure) -> str | None:
    """The key whose text broke DeepSpeed's arithmetic, by the line it happened on."""
    named = re.search(_NOT_IN_KWARGS, failure.message)
    if named is not None:
        return named.group(1)
    if failure.type != "TypeError" or not re.search(_STRING_ARITHMETIC, failure.message):
        return None
    for frame in reversed(failure.frames):
        line = f"{frame.file}:{frame.function}:{frame.text}"
        if "gradient_clipping" in line or "clip_grad" in line:
            return "gradient_clipping"
        if re.search(r"_set_batch_related_parameters|_batch_assertion", line):
            return batch.MICRO
        if re.search(r"_configure_basic_optimizer", line):
            return "optimizer.params"
        if re.search(r"_scheduler_from_config", line):
            return "scheduler.params"
    return None


def _unresolved(config: ConfigFacts) -> list[_Auto]:
    """All that stays "auto" under the framework; with none known, as plain DeepSpeed would see it."""
    if keys.get(config.data, "autotuning.enabled") is True:
        return []
    resolved = _RESOLVED.get(config.framework or "", frozenset())
    schema = schema_for(config.release)
    found = [key for key, value in keys.leaves(config.data) if value == "auto" and key not in resolved]
    autos = (_judge(key, schema, config) for key in found)
    return [auto for auto in autos if auto is not None]


def _judge(key: str, schema: Schema, config: ConfigFacts) -> _Auto | None:
    """What "auto" does at this key; None where it is a value of its own, or where the key is not DeepSpeed's."""
    entry = schema.key(key)
    in_params = key.startswith(("optimizer.params.", "scheduler.params."))
    if (entry is None and not in_params) or (entry is not None and entry.default == "auto"):
        return None
    if config.framework in RESOLVERS:
        return _Auto(key=key, effect="Accelerate raises a ValueError", severity="error", replacement=_default(entry))
    section = schema.sections.get(key.rpartition(".")[0])
    if section is None or not section.typed:
        return _Auto(key=key, effect=_late_failure(key), severity="error", replacement=_default(entry))
    default = entry.default if entry is not None else None
    effect = f"counts as not given, which is {as_json(default)}"
    severity: Severity = "error" if key in _SWITCHES else "warning"
    return _Auto(key=key, effect=effect, severity=severity, replacement=None if key in _SWITCHES else default)


def _default(entry: Any) -> Any:
    return entry.default if entry is not None else None


def _late_failure(key: str) -> str:
    if key in batch.KEYS:
        return "a TypeError when DeepSpeed works out the batch sizes"
    if key == "gradient_clipping":
        return "a TypeError at the first optimizer step"
    if key.startswith(("optimizer.", "scheduler.")):
        return "a TypeError when the optimizer or scheduler is built"
    return "DeepSpeed takes the text as the value"


def _fix(autos: list[_Auto]) -> Fix:
    known = [auto for auto in autos if auto.replacement is not None]
    open_keys = [auto.key for auto in autos if auto.replacement is None]
    change = patch.combine(*(keys.as_patch(auto.key, auto.replacement) for auto in known))
    text = f"write the value that is meant for {as_list(open_keys)}" if open_keys else "write the values"
    defaults = as_list(f"{auto.key} {as_json(auto.replacement)}" for auto in known) if known else ""
    return Fix(text=f"{text}; DeepSpeed's default: {defaults}" if defaults else text, patch=change or None)


DIAGNOSES: tuple[Diagnosis, ...] = (AutoUnresolved(),)
