"""The keys of the ds_config against DeepSpeed's own schema: what it does not know."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dsdoctor.case import Case
from dsdoctor.diagnoses import config_elsewhere
from dsdoctor.diagnoses.base import Diagnosis
from dsdoctor.diagnoses.config_evidence import as_json, as_list, at_key, matching, raised
from dsdoctor.diagnoses.config_params import (
    UnknownParam,
    optimizer_class,
    scheduler_class,
    unknown_params,
    unknown_type,
)
from dsdoctor.dsconfig import keys, patch
from dsdoctor.dsconfig.effective import Effective
from dsdoctor.dsconfig.facts import ConfigFacts
from dsdoctor.dsconfig.letters import unusual
from dsdoctor.dsconfig.release import version_key
from dsdoctor.dsconfig.schema import Key, Schema, Section, nearest, releases_with, schema_for
from dsdoctor.finding import Evidence, Finding, Fix, Severity
from dsdoctor.runs.facts import Failure

_MODELS = {
    "DeepSpeedZeroConfig": "zero_optimization",
    "DeepSpeedZeroOffloadParamConfig": "zero_optimization.offload_param",
    "DeepSpeedZeroOffloadOptimizerConfig": "zero_optimization.offload_optimizer",
    "ZenFlowConfig": "zero_optimization.zenflow",
    "DeepSpeedFP16Config": "fp16",
    "DeepSpeedBF16Config": "bf16",
    "CommsLoggerConfig": "comms_logger",
    "CompileConfig": "compile",
    "TPTrainingConfig": "tensor_parallel",
    "HybridEngineConfig": "hybrid_engine",
}
"""Names of the pydantic models in DeepSpeed's exceptions, and the sections they stand for."""

_REFUSED_NAMES = (
    ("optimizer.params.max_grad_norm", r"'max_grad_norm' is not supported as an optimizer parameter"),
    ("optimizer.type", r"AssertionError: \w+ is not a supported DeepSpeed Optimizer"),
    ("scheduler.type", r"AssertionError: DeepSpeed does not recognize LR scheduler"),
)
_VALIDATION = r"validation errors? for (\w+)"
_FIELD = re.compile(r"^(?P<key>\w[\w.]*(?: -> \w+)*)\n\s+(?P<what>.+?)(?: \[type=.*| \(type=.*)?$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One key that the config has, with what the schema knows of it (`key` None: nothing).

    `name` is the last part of `path` as written, which may have dots of its own.
    """

    path: str
    name: str
    value: Any
    section: Section
    key: Key | None

    @property
    def section_path(self) -> str:
        """The dotted key of the object that the key stands in, as the config names it."""
        return self.path[: len(self.path) - len(self.name)].rstrip(".")


def entries(data: Mapping[str, Any], schema: Schema, section: str = "", prefix: str = "") -> Iterator[Entry]:
    """All keys of the sections that the schema knows, outer ones first; `prefix` is the name that the config uses."""
    known = schema.sections[section]
    for name, value in data.items():
        path = f"{prefix}.{name}" if prefix else str(name)
        key = known.key(str(name))
        yield Entry(path=path, name=str(name), value=value, section=known, key=key)
        inner = key.path if key is not None else path
        if key is not None and key.successor and key.successor in schema.sections and key.successor not in data:
            inner = key.successor  # `bfloat16` is read where there is no `bf16`
        if isinstance(value, Mapping) and inner and inner in schema.sections:
            yield from entries(value, schema, inner, path)


def validation_errors(case: Case) -> Iterator[tuple[Evidence, str, str]]:
    """pydantic's complaints about the config in the job's exceptions: evidence, dotted key, what is wrong with it."""
    for failure, key, field in _refused(case):
        yield raised(failure), key, field["what"]


def refused_autos(case: Case) -> dict[str, Evidence]:
    """The dotted keys for which pydantic was given "auto" and refused it, as older releases do."""
    return {key: raised(failure) for failure, key, field in _refused(case) if "input_value='auto'" in field.group()}


def _refused(case: Case) -> Iterator[tuple[Failure, str, re.Match[str]]]:
    for failure, match in matching(case, _VALIDATION):
        section = _MODELS.get(match.group(1))
        if section is None:
            continue
        for field in _FIELD.finditer(failure.message):
            yield failure, f"{section}.{field['key'].replace(' -> ', '.')}", field


class UnknownKey(Diagnosis):
    """A key of the ds_config that the installed DeepSpeed does not know.

    At the top level, and in sections that DeepSpeed reads as plain dicts, such a key is ignored without a word, so
    that a misspelled section does nothing. Typed sections (zero_optimization, fp16, bf16, ...) refuse it. Parameters of
    the optimizer and the scheduler go to the constructor of their class, which raises a TypeError.

    What proves it: DeepSpeed's own schema for the release, read from its code; or the exception with the key in it.

    When it could be wrong: a top-level key that the script reads for itself. It is a warning only where it looks like
    a known key or stands in the wrong section, else a note. A script that passes its own optimizer to
    `deepspeed.initialize` does not use the optimizer section.

    What to do: use the key that was meant; the nearest known one is offered.
    """

    id = "config/unknown-key"
    severity = "error"
    title = "a key that DeepSpeed does not know"

    def examine(self, case: Case) -> Iterator[Finding]:
        config = case.config
        raised_for: dict[str, Evidence] = {
            key: evidence
            for evidence, key, what in validation_errors(case)
            if re.search(r"[Ee]xtra (?:inputs|fields)", what)
        }
        raised_for |= dict(_rejected_params(case))
        if config is not None:
            schema = schema_for(config.release)
            for entry in entries(config.data, schema):
                if entry.key is None and not was_removed(entry.path, schema) and not _is_comment(entry):
                    yield self._unknown(config, schema, entry, raised_for.pop(entry.path, None))
            for param in unknown_params(config):
                yield self._param(config, param, raised_for.pop(param.path, None))
            wrong_type = unknown_type(config)
            if removed_optimizers(config):
                raised_for.pop("optimizer.type", None)
            elif wrong_type is not None:
                yield self._type(config, *wrong_type, raised_for.pop(wrong_type[0], None))
        for key, evidence in raised_for.items():
            yield self._from_exception(key, evidence)

    def _unknown(self, config: ConfigFacts, schema: Schema, entry: Entry, exception: Evidence | None) -> Finding:
        target = _target(config, schema, entry)
        instead = config_elsewhere.instead(entry.path, entry.value)
        dotted = "." in entry.name
        known_in = releases_with(entry.path) if not dotted else ()
        nested = dotted and not entry.section_path and schema.key(entry.path) is not None
        severity: Severity = "warning" if target or instead or nested or _newer(known_in, schema) else "info"
        refused = entry.section.forbids and entry.value != "auto"  # "auto" is taken out before the keys are looked at
        if refused:
            severity = "error"
        reaction = "refuses it" if refused else "ignores it without a word"
        cause = f"DeepSpeed {schema.release} does not know {_shown(entry, target)} and {reaction}"
        if known_in:
            cause += f"; releases {known_in[0]} to {known_in[-1]} know it"
        if instead:
            cause += f"; {instead}"
        if dotted:
            cause += "; a name with dots is one key, DeepSpeed reads objects in objects"
        return self.finding(
            severity=severity,
            cause=cause,
            evidence=(*([exception] if exception else []), at_key(config, entry.path)),
            confidence=0.98 if entry.section.forbids else 0.9,
            caveat=None if entry.section.forbids else "The script may read this key for itself.",
            fixes=_rename(entry, target) if not dotted else (Fix(text="write objects in objects"),),
            keys=(entry.path,),
        )

    def _param(self, config: ConfigFacts, param: UnknownParam, exception: Evidence | None) -> Finding:
        name = param.path.rpartition(".")[2]
        clipping = name == "max_grad_norm" and param.path.startswith("optimizer.")
        safe = bool(param.meant) or (clipping and not config.has("gradient_clipping"))
        new = {"gradient_clipping": param.value} if clipping else {}
        change = patch.combine(keys.as_patch(param.path, None), new)
        text = f"write gradient_clipping: {as_json(param.value)} at the top level instead" if clipping else "drop it"
        if not clipping and not param.meant and param.takes:
            text += f"; {param.owner} takes {as_list(param.takes)}"
        if param.meant:
            change = patch.combine(change, keys.as_patch(f"{param.path.rpartition('.')[0]}.{param.meant}", param.value))
            text = f"write {param.meant}"
        return self.finding(
            cause=f"{param.owner} takes no parameter {name}; its constructor raises",
            evidence=(*([exception] if exception else []), at_key(config, param.path)),
            confidence=0.98 if exception else 0.9,
            caveat=None if exception else "Not if the script passes its own optimizer or scheduler.",
            fixes=(Fix(text=text, patch=change, safe=safe),),
            keys=(param.path,),
        )

    def _type(self, config: ConfigFacts, key: str, meant: str | None, exception: Evidence | None) -> Finding:
        known = Fix(text=f"write {meant}", patch=keys.as_patch(key, meant), safe=True)
        fix = known if meant else Fix(text="name a known class")
        return self.finding(
            cause=f"neither DeepSpeed nor torch has {as_json(config.value(key))} for {key}",
            evidence=(*([exception] if exception else []), at_key(config, key)),
            confidence=0.98 if exception else 0.9,
            caveat=None if exception else "Not if the script passes its own optimizer or scheduler.",
            fixes=(fix,),
            keys=(key,),
        )

    def _from_exception(self, key: str, evidence: Evidence) -> Finding:
        schema = schema_for("")
        section, _, name = key.rpartition(".")
        known = schema.sections.get(section)
        meant = nearest(name, known.names()) if known else None
        text = f"write {meant}, if that is what {name} means" if meant else f"drop {name}"
        return self.finding(
            cause=f"DeepSpeed refuses {key}, which it does not know",
            evidence=(evidence,),
            confidence=0.95,
            fixes=(Fix(text=text),),
            keys=(key,),
        )


def _rejected_params(case: Case) -> Iterator[tuple[str, Evidence]]:
    """Parameters that the constructor of an optimizer or scheduler refused."""
    for failure, match in matching(case, r"TypeError: .*__init__\(\) got an unexpected keyword argument '(\w+)'"):
        for function, section in (("_configure_basic_optimizer", "optimizer"), ("_scheduler_from_config", "scheduler")):
            if any(frame.function == function for frame in failure.frames):
                yield f"{section}.params.{match.group(1)}", raised(failure)
    for key, pattern in _REFUSED_NAMES:
        for failure, _ in matching(case, pattern):
            yield key, raised(failure)


def _is_comment(entry: Entry) -> bool:
    """A key that stands there for people, in a section that ignores what it does not know."""
    name = entry.name
    return not entry.section.forbids and (name.startswith(("_", "$", "/", "#")) or name.lower() == "comment")


def _names_for(entry: Entry) -> list[str]:
    """The names of the section that take a value of this shape: an object is no number that was misspelled."""
    is_object = isinstance(entry.value, Mapping)
    fitting = (key for key in entry.section.keys.values() if (key.kind in ("section", "dict", "any")) == is_object)
    return [name for key in fitting for name in (key.path.rpartition(".")[2], key.also) if name]


def _home(name: str, section: str, schema: Schema) -> str | None:
    """The one other section that knows a key of that name, None where none or several do.

    A key of fp16 in bf16 is no matter of the place: bf16 has no loss scale.
    """
    if name in ("enabled", "type", "params", "device") or section in ("bf16", "bfloat16"):
        return None
    homes = [path for path, other in schema.sections.items() if path != section and other.key(name) is not None]
    return homes[0] if len(homes) == 1 else None


def _home_in_params(config: ConfigFacts, name: str, section: str) -> str | None:
    """`optimizer.params` or `scheduler.params` for a key outside of it that the config's class takes there."""
    effective = Effective.of(config)
    for owner, signature in (("optimizer", optimizer_class(effective)), ("scheduler", scheduler_class(effective))):
        if section in ("", owner) and signature is not None and name in signature.params:
            return f"{owner}.params"
    return None


def _target(config: ConfigFacts, schema: Schema, entry: Entry) -> str | None:
    """The dotted key that is most likely meant by an unknown one; None where none is, or where it stands there too."""
    section, name = entry.section_path, entry.name
    meant = nearest(name, _names_for(entry))
    home = _home(name, section, schema) or _home_in_params(config, name, section)
    targets = (
        f"{section}.{meant}".lstrip(".") if meant else None,
        config_elsewhere.target(entry.path, entry.value, schema),
        f"{home}.{name}".lstrip(".") if home is not None else None,
    )
    return next((target for target in targets if target is not None and not config.has(target)), None)


def _newer(known_in: tuple[str, ...], schema: Schema) -> bool:
    return bool(known_in) and version_key(known_in[0]) > version_key(schema.release)


def _shown(entry: Entry, target: str | None) -> str:
    """The key; with what cannot be seen of it, where that is why it is not the known one."""
    hidden = unusual(entry.name) if target is not None else None
    return f"{as_json(entry.path)} ({hidden})" if hidden else entry.path or as_json(entry.name)


def _rename(entry: Entry, target: str | None) -> tuple[Fix, ...]:
    dropped = keys.as_patch(entry.path, None)
    if target is None:
        return (Fix(text=f"drop {entry.path}, or move it out of the ds_config", patch=dropped),)
    moved = patch.combine(dropped, keys.as_patch(target, entry.value))
    misspelled = target.rpartition(".")[0] == entry.section_path
    return (Fix(text=f"write {target}", patch=moved, safe=entry.section.forbids and misspelled),)


def was_removed(path: str, schema: Schema) -> bool:
    """Refused by name, or once known to a typed section that refuses it now."""
    if path in schema.removed:
        return True
    section = schema.sections.get(path.rpartition(".")[0])
    known_in = releases_with(path)
    older = bool(known_in) and version_key(known_in[-1]) < version_key(schema.release)
    return section is not None and section.forbids and older


def removed_optimizers(config: ConfigFacts) -> list[str]:
    """`optimizer.type` if an older release had that optimizer."""
    name = config.value("optimizer.type")
    schema = schema_for(config.release)
    oldest = schema_for("0.14.4")
    gone = isinstance(name, str) and name.lower() in set(oldest.optimizer_names) - set(schema.optimizer_names)
    return ["optimizer.type"] if gone and version_key(schema.release) > version_key(oldest.release) else []


DIAGNOSES: tuple[Diagnosis, ...] = (UnknownKey(),)
