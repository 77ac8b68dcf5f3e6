"""One entry of the tables of options in a ds_config that exclude each other; `config_conflict` is the rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dsdoctor.dsconfig.effective import Effective
from dsdoctor.finding import Severity
from dsdoctor.model_config import ModelConfig
from dsdoctor.scripts.facts import ScriptFacts


@dataclass(frozen=True, kw_only=True)
class Conflict:
    """Options that do not go together.

    `holds` looks at the config as DeepSpeed understands it; `script` at the calls of the script, `ranks` at the number
    of ranks and `model` at the model's config.json, where the other half of the conflict is there: all have to hold.
    `message` is a pattern of the exception that DeepSpeed raises for it, None where it raises none. `since` and `until`
    are DeepSpeed releases, both included.
    """

    keys: tuple[str, ...]
    holds: Callable[[Effective], bool]
    cause: str
    fix: str
    patch: dict[str, Any] | None = None
    script: Callable[[ScriptFacts], bool] | None = None
    ranks: Callable[[Effective, int], bool] | None = None
    model: Callable[[Effective, ModelConfig], bool] | None = None
    message: str | None = None
    severity: Severity = "error"
    since: str | None = None
    until: str | None = None
    caveat: str | None = None
