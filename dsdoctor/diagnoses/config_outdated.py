"""Keys of the ds_config that are past: removed from the release at hand, or deprecated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dsdoctor.case import Case
from dsdoctor.diagnoses.base import Diagnosis
from dsdoctor.diagnoses.config_evidence import at_key, matching, raised
from dsdoctor.diagnoses.config_keys import Entry, entries, removed_optimizers, was_removed
from dsdoctor.dsconfig import keys, patch
from dsdoctor.dsconfig.facts import ConfigFacts
from dsdoctor.dsconfig.schema import Schema, releases_with, schema_for
from dsdoctor.finding import Evidence, Finding, Fix


class Removed(Diagnosis):
    """A key, or an optimizer, that older DeepSpeed releases took and the installed one refuses.

    DeepSpeed 0.19.7 and 0.19.8 took out a number of features (amp, elasticity, curriculum_learning at the top level,
    MiCS, 1-bit optimizers, ...). The key alone raises `DeepSpeedConfigError`, even in a section that is switched off.

    What proves it: the list of removed keys in the code of the installed release, or the exception.

    When it could be wrong: if another release is installed where the job runs than the one it is judged for.

    What to do: drop the key; where the feature is needed, stay with the last release that has it.
    """

    id = "config/removed"
    severity = "error"
    title = "a key that this DeepSpeed release no longer takes"

    def examine(self, case: Case) -> Iterator[Finding]:
        config = case.config
        exceptions = tuple(raised(f) for f, _ in matching(case, r"DeepSpeedConfigError: .*has been removed"))
        found = False
        if config is not None:
            schema = schema_for(config.release)
            gone = [entry.path for entry in entries(config.data, schema) if entry.key is None]
            for path in [path for path in gone if was_removed(path, schema)] + removed_optimizers(config):
                found = True
                yield self._removed(config, schema, path, exceptions)
        if exceptions and not found:
            yield self.finding(
                cause=exceptions[0].text.partition(": ")[2],
                evidence=exceptions,
                confidence=0.95,
                fixes=(Fix(text="drop the section that the message names"),),
            )

    def _removed(self, config: ConfigFacts, schema: Schema, path: str, exceptions: tuple[Evidence, ...]) -> Finding:
        known_in = releases_with(path)
        reason = schema.removed.get(path, f"DeepSpeed {schema.release} no longer takes it")
        if path == "optimizer.type":
            reason = f"the optimizer {config.value(path)} is gone"
            fix = Fix(text="use AdamW", patch=keys.as_patch(path, "AdamW"))
        else:
            last = f", or stay with DeepSpeed {known_in[-1]} or older" if known_in else ""
            fix = Fix(text=f"drop {path}{last}", patch=keys.as_patch(path, None), safe=_is_off(config.value(path)))
        return self.finding(
            cause=f"{path}: {reason}",
            evidence=(*exceptions, at_key(config, path)),
            confidence=0.98,
            fixes=(fix,),
            keys=(path,),
        )


def _is_off(value: Any) -> bool:
    """A section or switch that does nothing as it stands."""
    return not value or (isinstance(value, Mapping) and value.get("enabled") is False)


class Deprecated(Diagnosis):
    """An old key that has a successor: `cpu_offload`, `cpu_offload_param`, `bfloat16`, `zero_optimization: true`, ...

    What proves it: DeepSpeed's own schema marks it so, and it still takes the key with a warning. Given together with
    its successor it raises.

    When it could be wrong: not for the installed release; how long the old key still works nobody says.

    What to do: write the successor.
    """

    id = "config/deprecated"
    severity = "warning"
    title = "an old key that has a successor"

    def examine(self, case: Case) -> Iterator[Finding]:
        config = case.config
        if config is None:
            return
        schema = schema_for(config.release)
        if isinstance(config.value("zero_optimization"), bool):
            yield self._zero_as_bool(config)
        for entry in entries(config.data, schema):
            if entry.key is not None and entry.key.successor is not None:
                yield self._deprecated(config, entry, entry.key.successor)

    def _zero_as_bool(self, config: ConfigFacts) -> Finding:
        stage = 1 if config.value("zero_optimization") else 0
        return self.finding(
            cause=f"zero_optimization as true or false is an old form; it means stage {stage}",
            evidence=(at_key(config, "zero_optimization"),),
            confidence=1.0,
            fixes=(
                Fix(
                    text=f"write the section with stage {stage}",
                    patch={"zero_optimization": {"stage": stage}},
                    safe=True,
                ),
            ),
            keys=("zero_optimization",),
        )

    def _deprecated(self, config: ConfigFacts, entry: Entry, successor: str) -> Finding:
        change, same = _translated(entry)
        text = f"write {successor} instead" if entry.value else "drop it: it is off, as it is without the key"
        beside = any(_is_given(config, key, entry.path) for key in keys.patched_keys(change) if key != entry.path)
        return self.finding(
            cause=f"{entry.path} is deprecated; its successor is {successor}",
            evidence=(at_key(config, entry.path),),
            confidence=1.0,
            fixes=(Fix(text=text, patch=change, safe=same and not beside),),
            keys=(entry.path,),
        )


def _is_given(config: ConfigFacts, key: str, old: str) -> bool:
    """The config has the successor of `old` already, or the section that it would begin."""
    begun = key.rpartition(".")[0]
    return config.has(key) or (begun != old.rpartition(".")[0] and config.has(begun))


def _translated(entry: Entry) -> tuple[dict[str, Any], bool]:
    """The patch that writes the successor, and whether the config means the same with it."""
    dropped = keys.as_patch(entry.path, None)
    name = entry.path.rpartition(".")[2]
    zero = "zero_optimization"
    news = {
        "cpu_offload": keys.as_patch(f"{zero}.offload_optimizer.device", "cpu"),
        "cpu_offload_param": keys.as_patch(f"{zero}.offload_param.device", "cpu"),
        "stage3_gather_fp16_weights_on_model_save": keys.as_patch(
            f"{zero}.stage3_gather_16bit_weights_on_model_save", entry.value
        ),
        "bfloat16": {"bf16": entry.value},
    }
    if not entry.value:
        return dropped, True
    return (patch.combine(dropped, news[name]), True) if name in news else (dropped, False)


DIAGNOSES: tuple[Diagnosis, ...] = (Removed(), Deprecated())
