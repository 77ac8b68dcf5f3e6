"""The ds_config against the arguments of Hugging Face's Trainer."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dsdoctor.case import Case
from dsdoctor.diagnoses.base import Diagnosis
from dsdoctor.diagnoses.config_evidence import as_json, as_list, at_key, matching, raised
from dsdoctor.dsconfig import batch, keys, parallel, patch
from dsdoctor.dsconfig.effective import Effective
from dsdoctor.dsconfig.facts import ConfigFacts
from dsdoctor.finding import Evidence, Finding, Fix

_CLIPPING = "gradient_clipping"
_MESSAGE = r"DeepSpeed config values that mismatch\s+(?:TrainingArguments|kwargs)"
_LINE = re.compile(r"- ds (?P<key>[\w.]+)=(?P<ours>.*?) vs (?:hf|arg) (?P<name>.*?)=(?P<theirs>.*)")


@dataclass(frozen=True, kw_only=True)
class _Mismatch:
    """One key with the value of each side; `name` is Hugging Face's name for it."""

    key: str
    ours: Any
    name: str
    theirs: Any

    def __str__(self) -> str:
        text = f"{self.key} is {_shown(self.ours)} in the ds_config, {self.name} is {_shown(self.theirs)}"
        same_letters = str(self.ours) == str(self.theirs) and type(self.ours) is not type(self.theirs)
        return f"{text} (a text on one side, a number on the other)" if same_letters else text


class HfMismatch(Diagnosis):
    """The ds_config and Hugging Face's TrainingArguments give different values for the same thing.

    What proves it: the ValueError of Transformers, which lists every pair (`- ds key=... vs hf key=...`), or the
    config held against the arguments on the script's command line. `8 vs 8` is a text against a number. A
    `max_grad_norm` without `gradient_clipping` in the ds_config is lost, and only a warning.

    When it could be wrong: arguments that a script builds itself, whatever its command line says. Arguments that are
    not on the command line have defaults that a script may change, so only those that are given are compared.

    What to do: decide which side is meant. "auto" in the ds_config takes the argument; nobody can choose for you which
    of the two values is right.
    """

    id = "config/hf-mismatch"
    severity = "error"
    title = "ds_config and TrainingArguments disagree"

    def examine(self, case: Case) -> Iterator[Finding]:
        config = case.config
        exceptions = [failure for failure, _ in matching(case, _MESSAGE)]
        listed = [_parsed(line) for failure in exceptions[:1] for line in _LINE.finditer(failure.message)]
        compared = list(_compared(config)) if config is not None and not listed else []
        if config is not None:
            yield from self._lost_clipping(config)
        mismatches = listed or compared
        if not mismatches:
            return
        yield self.finding(
            cause=f"the two sides disagree on {as_list(dict.fromkeys(m.key for m in mismatches))}: {mismatches[0]}",
            evidence=(*(raised(failure) for failure in exceptions), *_evidence(config, mismatches)),
            confidence=0.98 if exceptions else 0.9,
            caveat=None if exceptions else "A script can set these arguments itself, whatever its command line says.",
            fixes=_fixes(mismatches),
            keys=tuple(dict.fromkeys(m.key for m in mismatches)),
        )

    def _lost_clipping(self, config: ConfigFacts) -> Iterator[Finding]:
        """DeepSpeed clips by its own key alone; Transformers fills that in only where it stands there as "auto"."""
        wanted = _number(config.hf_arguments or {}, "max_grad_norm")
        given = Effective.of(config).get(_CLIPPING)
        if wanted is None or not config.data or config.has(_CLIPPING) or given is None or _same(given, wanted):
            return
        yield self.finding(
            severity="warning",
            title="max_grad_norm does not reach DeepSpeed",
            cause=f"max_grad_norm is {wanted:g}, but the ds_config has no gradient_clipping, so that DeepSpeed "
            + (f"clips at its default {given:g}" if given else "does not clip"),
            evidence=(at_key(config, _CLIPPING, "no gradient_clipping"),),
            confidence=0.85,
            fixes=(Fix(text='write gradient_clipping: "auto"', patch={_CLIPPING: "auto"}),),
            keys=(_CLIPPING,),
        )


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else as_json(value)


def _parsed(line: re.Match[str]) -> _Mismatch:
    return _Mismatch(key=line["key"], ours=line["ours"], name=line["name"], theirs=line["theirs"].strip())


def _evidence(config: ConfigFacts | None, mismatches: list[_Mismatch]) -> Iterator[Evidence]:
    for mismatch in mismatches:
        if config is not None and config.has(mismatch.key):
            yield at_key(config, mismatch.key, str(mismatch))
        else:
            yield Evidence(source="TrainingArguments", text=str(mismatch))


def _fixes(mismatches: list[_Mismatch]) -> tuple[Fix, ...]:
    names = as_list(dict.fromkeys(m.key for m in mismatches))
    return (
        Fix(
            text=f'set {names} to "auto", which takes the argument',
            patch=patch.combine(*(keys.as_patch(m.key, "auto") for m in mismatches)),
        ),
        Fix(text="or pass the value of the ds_config as the argument"),
    )


def _same(ours: Any, theirs: Any) -> bool:
    """Equal as Transformers compares them (`!=` on the loaded values)."""
    return bool(ours == theirs)


def _compared(config: ConfigFacts) -> Iterator[_Mismatch]:
    """The pairs that Transformers would refuse, for the arguments that are given (`HfTrainerDeepSpeedConfig`)."""
    if config.hf_arguments is None:
        return
    for key, name, compute in _PAIRS:
        ours = config.value(key)
        if ours is None or ours == "auto":
            continue
        theirs = compute(config.hf_arguments, config)
        if theirs is not None and not _same(ours, theirs):
            yield _Mismatch(key=key, ours=ours, name=name, theirs=theirs)


Arguments = Mapping[str, Any]


def _number(arguments: Arguments, name: str) -> Any:
    value = arguments.get(name)
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _plain(name: str) -> Callable[[Arguments, ConfigFacts], Any]:
    return lambda arguments, _config: _number(arguments, name)


def _warmup(arguments: Arguments, _config: ConfigFacts) -> Any:
    """A number of steps; Transformers takes a fraction for a share of all steps, and 0 as not given."""
    steps = _number(arguments, "warmup_steps")
    return steps if steps is not None and steps >= 1 else None


def _total(arguments: Arguments, config: ConfigFacts) -> Any:
    micro = _number(arguments, "per_device_train_batch_size")
    steps = arguments.get("gradient_accumulation_steps", 1)
    if micro is None or config.world_size is None or not isinstance(steps, int):
        return None
    ranks = parallel.grid(config.data, config.world_size, release=config.release).ranks
    return config.world_size * micro * steps if ranks == (config.world_size,) else None


def _betas(arguments: Arguments, _config: ConfigFacts) -> Any:
    first, second = _number(arguments, "adam_beta1"), _number(arguments, "adam_beta2")
    if first is None and second is None:
        return None
    return [0.9 if first is None else first, 0.999 if second is None else second]


def _switch(name: str, other: str) -> Callable[[Arguments, ConfigFacts], Any]:
    """Whether a precision is on: given, or off because the other one is (Transformers refuses both)."""

    def read(arguments: Arguments, _config: ConfigFacts) -> Any:
        given = [arguments[word] for word in (name, f"{name}_full_eval") if word in arguments]
        if given:
            return True in given
        return False if arguments.get(other) is True else None

    return read


_PAIRS: tuple[tuple[str, str, Callable[[Arguments, ConfigFacts], Any]], ...] = (
    (batch.MICRO, "per_device_train_batch_size", _plain("per_device_train_batch_size")),
    (batch.STEPS, "gradient_accumulation_steps", _plain("gradient_accumulation_steps")),
    (batch.TRAIN, "train_batch_size (calculated)", _total),
    ("gradient_clipping", "max_grad_norm", _plain("max_grad_norm")),
    ("optimizer.params.lr", "learning_rate", _plain("learning_rate")),
    ("optimizer.params.betas", "adam_beta1+adam_beta2", _betas),
    ("optimizer.params.eps", "adam_epsilon", _plain("adam_epsilon")),
    ("optimizer.params.weight_decay", "weight_decay", _plain("weight_decay")),
    ("scheduler.params.warmup_max_lr", "learning_rate", _plain("learning_rate")),
    ("scheduler.params.warmup_num_steps", "warmup_steps", _warmup),
    ("fp16.enabled", "fp16|fp16_full_eval", _switch("fp16", "bf16")),
    ("bf16.enabled", "bf16|bf16_full_eval", _switch("bf16", "fp16")),
)


DIAGNOSES: tuple[Diagnosis, ...] = (HfMismatch(),)
