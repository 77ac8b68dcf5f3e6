"""What Lightning, Accelerate and Transformers themselves refuse in a ds_config, before DeepSpeed sees it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from dsdoctor.case import Case
from dsdoctor.diagnoses.base import Diagnosis
from dsdoctor.diagnoses.config_evidence import as_list, at_key, everyone, raised
from dsdoctor.dsconfig import keys, patch
from dsdoctor.dsconfig.facts import ConfigFacts
from dsdoctor.dsconfig.schema import schema_for
from dsdoctor.finding import Evidence, Finding, Fix
from dsdoctor.runs.facts import Failure

_GLUE = re.compile(
    r"[/\\](?:(?P<lightning>lightning|pytorch_lightning|lightning_fabric)[/\\](?:.*[/\\])?strategies[/\\]deepspeed\.py"
    r"|(?P<accelerate>accelerate)[/\\](?:accelerator|utils[/\\](?:deepspeed|dataclasses))\.py"
    r"|(?P<transformers>transformers)[/\\](?:integrations[/\\])?deepspeed\.py)$"
)
"""The modules by which they hand a ds_config to DeepSpeed."""
_OF_THE_CONFIG = re.compile(r"deepspeed config\b|\bconfig file\b|adjust your config", re.IGNORECASE)
_TOLD_ELSEWHERE = re.compile(
    r"config values that mismatch|not found in kwargs|path does not exist|must pass in a|string path to an existing"
)
"""The values of the arguments (config/hf-mismatch), "auto" (config/auto-unresolved), a file that is not there
(config/syntax), and a script that names no config at all, which is not the config's fault."""
_TO_BE_LEFT_OUT = re.compile(r"\b(?:[Dd]o not set|cannot specify|cannot be set|remove)\b")
_IN_WORDS = {"ZeRO optimization config": "zero_optimization", "ZeRO Stage": "zero_optimization.stage"}
"""Keys that a message does not call by their name."""
_NAMES = {"lightning": "Lightning", "accelerate": "Accelerate", "transformers": "Transformers"}


class RefusedByFramework(Diagnosis):
    """Lightning, Accelerate or Transformers refuses what the ds_config says, or misses something in it.

    What it is: each of them sets some keys itself. Lightning's Trainer wants accumulation as `accumulate_grad_batches`
    and refuses `gradient_accumulation_steps` in the ds_config; Accelerate refuses an optimizer or a schedule both in
    the ds_config and in the code, or neither a batch size nor a data loader to take it from.

    What proves it: an exception that was raised in the module with which they hand the ds_config on, and that speaks
    of the config.

    When it could be wrong: the script may be what is to be changed, where both name the same thing: an optimizer of the
    code can make way for `DummyOptim` as well as the one of the ds_config.

    What to do: what the message asks for. The same ds_config can be right for `deepspeed.initialize` and wrong here.
    """

    id = "config/refused-by-framework"
    severity = "error"
    title = "the framework refuses the ds_config"

    def examine(self, case: Case) -> Iterator[Finding]:
        refused = [(failure, who) for failure in everyone(case) if (who := _refused_by(failure)) is not None]
        if not refused:
            return
        first, who = refused[0]
        said = " ".join(first.message.split())
        named = _keys(said, case.config)
        yield self.finding(
            cause=f"{who} refuses the ds_config: {said}",
            evidence=(*(raised(failure) for failure, _ in refused), *_places(case.config, named)),
            confidence=0.95,
            fixes=(_fix(said, case.config, named),),
            keys=named,
        )


def _refused_by(failure: Failure) -> str | None:
    """The framework that raised this for what a ds_config says; None for any other exception."""
    glue = _GLUE.search(failure.frames[-1].file) if failure.frames else None
    about = _OF_THE_CONFIG.search(failure.message) is not None and _TOLD_ELSEWHERE.search(failure.message) is None
    return next(name for group, name in _NAMES.items() if glue[group]) if glue is not None and about else None


def _keys(said: str, config: ConfigFacts | None) -> tuple[str, ...]:
    """The ds_config keys that the message names, in its order."""
    schema = schema_for(config.release if config is not None else "")
    words = re.findall(r"[a-z]\w*(?:\.[a-z]\w*)*", said)
    named = [word for word in words if schema.key(word) is not None or word in schema.sections]
    named += [key for phrase, key in _IN_WORDS.items() if phrase in said]
    return tuple(dict.fromkeys(named))


def _places(config: ConfigFacts | None, named: Sequence[str]) -> Iterator[Evidence]:
    yield from (at_key(config, key) for key in named if config is not None and config.has(key))


def _fix(said: str, config: ConfigFacts | None, named: Sequence[str]) -> Fix:
    """Without the keys, where the message wants them away; else what it asks for, in words."""
    given = [key for key in named if config is not None and config.has(key)]
    if given and _TO_BE_LEFT_OUT.search(said):
        text = f"leave {as_list(given)} out of the ds_config"
        return Fix(text=text, patch=patch.combine(*(keys.as_patch(key, None) for key in given)))
    return Fix(text=f"give {as_list(named)} in the ds_config" if named else "do what the message asks for")


DIAGNOSES: tuple[Diagnosis, ...] = (RefusedByFramework(),)
