"""The values of the ds_config against the types, bounds and choices of DeepSpeed's own schema."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dsdoctor.case import Case
from dsdoctor.diagnoses.base import Diagnosis
from dsdoctor.diagnoses.config_evidence import as_json, at_error, at_key, described, matching, raised
from dsdoctor.diagnoses.config_keys import Entry, entries, refused_autos, validation_errors
from dsdoctor.diagnoses.config_meant import as_bool, convert, literal, of_text
from dsdoctor.dsconfig import batch, keys
from dsdoctor.dsconfig.facts import ConfigFacts
from dsdoctor.dsconfig.schema import Key, schema_for
from dsdoctor.dsconfig.shapes import shape_of
from dsdoctor.finding import Evidence, Finding, Fix, Severity

_WANTED = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "str": "a text",
    "section": "an object with keys",
    "any": "what DeepSpeed takes here",
}
_OR_ED = ("wall_clock_breakdown", "flops_profiler.enabled")
"""Switches that DeepSpeed joins with `|`, which raises for a text."""
_USED_LATER = "DeepSpeed keeps it as it is and fails where it is used"
_CHECKS = (("ge", "at least"), ("gt", "more than"), ("le", "at most"), ("lt", "less than"))
_TEXT_PARAMS = ("type", "warmup_type", "mode", "anneal_strategy", "threshold_mode", "scale_mode", "ns_method")
_YAML = re.compile(r"[\w-]+:(?:\s|$)|- ")
"""The beginning of a nested YAML object or list, which HJSON reads as text."""
_READS_CONFIG = re.compile(r"json\.loads?\(.*(?:config|cfg|\bds[_.]|deepspeed)|deepspeed\.py", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class _Wrong:
    """One value that does not fit, and the value that was most likely meant (None: not known).

    `works` says that a run goes on with the value as it stands, and otherwise than with the one that was meant.
    """

    path: str
    what: str
    severity: Severity = "error"
    meant: Any = None
    works: bool = False


class WrongType(Diagnosis):
    """A value of the ds_config that has the wrong type, or lies out of its bounds; or a file that strict JSON refuses
    where strict JSON is read.

    Typed sections refuse what they cannot convert; elsewhere the value is used as it stands, so that "false" in quotes
    counts as true, and a number in quotes raises in arithmetic. In HJSON `True,` without quotes is the text "True,".

    What proves it: the value against DeepSpeed's own schema; pydantic's exception with the key; a JSONDecodeError while
    the config was read.

    When it could be wrong: a number or truth value in quotes in a typed section works, since DeepSpeed converts it;
    that is a warning, because Transformers and Accelerate read the same value as a text. A JSONDecodeError can come
    from another file of the script.

    What to do: write numbers, true and false without quotes.
    """

    id = "config/wrong-type"
    severity = "error"
    title = "a value of the wrong type"

    def examine(self, case: Case) -> Iterator[Finding]:
        config = case.config
        exceptions = {key: (e, what) for e, key, what in validation_errors(case) if _is_type_error(what)}
        exceptions = {key: told for key, told in exceptions.items() if key not in refused_autos(case)}
        if config is not None:
            for wrong in (*_wrong_values(config), *_wrong_params(config)):
                evidence, _what = exceptions.pop(wrong.path, (None, ""))
                yield self._wrong(config, wrong, evidence)
        for key, (evidence, what) in exceptions.items():
            yield self.finding(
                cause=f"DeepSpeed refuses the value of {key}: {what}",
                evidence=(evidence,),
                confidence=0.95,
                fixes=(Fix(text=f"mend {key}"),),
                keys=(key,),
            )
        yield from self._strict_json(case)

    def _wrong(self, config: ConfigFacts, wrong: _Wrong, exception: Evidence | None) -> Finding:
        known = wrong.meant is not None
        text = f"write {as_json(wrong.meant)}" if known else f"mend {wrong.path}"
        return self.finding(
            severity=wrong.severity,
            cause=f"{wrong.path} {wrong.what}",
            evidence=(*([exception] if exception else []), at_key(config, wrong.path)),
            confidence=0.98,
            fixes=(
                Fix(
                    text=text,
                    patch=keys.as_patch(wrong.path, wrong.meant) if known else None,
                    safe=known and not wrong.works,
                ),
            ),
            keys=(wrong.path,),
        )

    def _strict_json(self, case: Case) -> Iterator[Finding]:
        """The file is HJSON, and whoever reads it takes JSON only."""
        config = case.config
        error = config.json_error if config is not None else None
        exceptions = [
            (failure, raised(failure))
            for failure, _ in matching(case, r"JSONDecodeError")
            if error is not None or any(_READS_CONFIG.search(f"{f.text} {f.file}") for f in failure.frames)
        ]
        reads_json = config is not None and config.framework not in (None, "deepspeed")
        if not exceptions and not (reads_json and error is not None):
            return
        shown = [at_error(config, error)] if config is not None and error is not None else []
        message = described(error) if error is not None else exceptions[0][1].text.partition(": ")[2]
        yield self.finding(
            title="the ds_config is not strict JSON",
            cause=f"the file is read with json.load, which refuses it: {message}",
            evidence=(*(evidence for _failure, evidence in exceptions), *shown),
            confidence=0.95 if shown else 0.75,
            caveat=None if shown else "The script may have been reading another JSON file.",
            fixes=(Fix(text="write strict JSON: no comments, no comma before a closing bracket, keys in quotes"),),
        )


def _is_type_error(what: str) -> bool:
    """pydantic's complaint is about the value alone, not about an unknown key or about several keys together."""
    return not re.match(r"[Ee]xtra (?:inputs|fields)|Value error(?!, [\w.]+ must be )|Assertion failed", what)


def _wrong_values(config: ConfigFacts) -> Iterator[_Wrong]:
    schema = schema_for(config.release)
    for entry in entries(config.data, schema):
        swallowed = _swallowed(config, entry.path, entry.value, entry.key.kind if entry.key is not None else None)
        if swallowed is not None:
            yield swallowed
        elif entry.key is not None and entry.value != "auto" and not _is_no_size(entry):
            wrong = _refused(entry, entry.key) or (_typed if entry.section.typed else _plain)(entry, entry.key)
            if wrong is not None:
                yield wrong


def _is_no_size(entry: Entry) -> bool:
    """A batch size of 0 or less, which config/batch-size tells."""
    return entry.path in batch.KEYS and batch.is_too_small(entry.value)


def _swallowed(config: ConfigFacts, path: str, value: Any, kind: str | None = None) -> _Wrong | None:
    """A value without quotes that was meant as something else: `True`, or one with the comma read into it.

    `kind` is the wanted one, None for the parameters of an optimizer or scheduler, which can be any.
    """
    if path not in config.quoteless or not isinstance(value, str):
        return None
    if _YAML.match(value):
        return _Wrong(path=path, what=f"is the text {as_json(value)}; this looks like YAML, and a ds_config is JSON")
    bare = value.rstrip(", ")
    meant = literal(bare, kind)
    if bare.lower() in ("true", "false", "none"):
        return _Wrong(path=path, what=f"is the text {as_json(value)}; JSON spells it lower-case", meant=meant)
    if value.endswith(","):
        what = f"has no quotes, so the comma belongs to the text {as_json(value)}"
        return _Wrong(path=path, what=what, meant=meant)
    return None


def _refused(entry: Entry, key: Key) -> _Wrong | None:
    """A value of a shape that DeepSpeed raises for at this key, whatever else the config says."""
    value, shape = entry.value, shape_of(entry.value)
    below_zero = shape == "fraction" and value < 0 and "negative-float" in key.refuses
    if below_zero and (key.kind != "int" or value <= -1):  # pydantic 1 cuts -0.5 to a whole 0
        shape = "negative-float"
    wrong_item = key.kind == "list" and key.choices and shape == "texts" and not set(value) <= set(key.choices)
    if (shape not in key.refuses and not wrong_item) or (key.also_bool and isinstance(value, bool)):
        return None
    least = _least(key) if shape in ("zero", "negative", "zero-float", "negative-float") else None
    what = f"is {as_json(value)}" + (f"; it has to be {least}" if least else f", not {_wanted(key)}")
    return _Wrong(path=entry.path, what=what, meant=_intended(entry, key))


def _least(key: Key) -> str | None:
    """The bound of a number that DeepSpeed refuses for being too small, None where it takes no number at all."""
    if key.kind not in ("int", "float") or key.choices or "whole" in key.refuses:
        return None
    return "more than 0" if "zero" in key.refuses else "at least 0"


def _intended(entry: Entry, key: Key) -> Any:
    """What was most likely meant by a refused value; None where that cannot be told."""
    if key.kind == "section":
        switches = ("fp16", "bf16", "bfloat16")
        return {"enabled": entry.value} if isinstance(entry.value, bool) and key.path in switches else None
    return key.default if entry.value is None else of_text(entry.value, key.kind)


def _typed(entry: Entry, key: Key) -> _Wrong | None:
    """What pydantic makes of the value, for the kinds that DeepSpeed uses (lax mode)."""
    value = entry.value
    if value is None or key.kind in ("any", "list", "dict", "section"):
        return None
    converted = convert(value, key.kind)
    if converted is None and not isinstance(value, str):
        return None  # its shape is one that this release takes
    if converted is None:
        return _Wrong(path=entry.path, what=f"is {as_json(value)}, not {_wanted(key)}", meant=of_text(value, key.kind))
    limits = _outside(entry.path, key, converted)
    if limits is not None:
        return limits
    if isinstance(value, str) and key.kind != "str":
        what = f"is {as_json(value)} in quotes; DeepSpeed converts it, other readers of the file do not"
        return _Wrong(path=entry.path, what=what, severity="warning", meant=converted)
    return None


def _plain(entry: Entry, key: Key) -> _Wrong | None:
    """Sections that DeepSpeed reads as they are: a text where a number or truth value is used."""
    value = entry.value
    if value is None or key.kind in ("any", "section"):
        return None
    if key.kind == "bool" and isinstance(value, str):
        harmless = as_bool(value) is True and entry.path not in _OR_ED
        what = f"is the text {as_json(value)}, and any text counts as true"
        return _Wrong(
            path=entry.path,
            what=what,
            severity="warning" if harmless else "error",
            meant=as_bool(value),
            works=not harmless,
        )
    misfit = (
        (key.kind in ("bool", "int", "float") and isinstance(value, (str, list, dict)))
        or (key.kind == "str" and not isinstance(value, str))
        or (key.kind == "list" and not isinstance(value, list))
        or (bool(key.choices) and str(value).lower() not in key.choices)
    )
    if not misfit:
        return None
    refused = isinstance(value, str) and bool(key.choices)
    what = f"is {as_json(value)}, not {_wanted(key)}"
    return _Wrong(path=entry.path, what=what if refused else f"{what}; {_USED_LATER}", meant=of_text(value, key.kind))


def _wanted(key: Key) -> str:
    if key.choices:
        words = ", ".join(as_json(choice) for choice in key.choices)
        return f"a list of {words}" if key.kind == "list" else f"one of {words}"
    return _WANTED.get(key.kind, f"a {key.kind}")


def _outside(path: str, key: Key, value: Any) -> _Wrong | None:
    if key.choices and value not in key.choices:
        return _Wrong(path=path, what=f"is {as_json(value)}, not {_wanted(key)}")
    for bound, words in _CHECKS:
        limit = key.bounds.get(bound)
        if limit is None:
            continue
        fits = {"ge": value >= limit, "gt": value > limit, "le": value <= limit, "lt": value < limit}[bound]
        if not fits:
            return _Wrong(path=path, what=f"is {as_json(value)}; it has to be {words} {limit:g}")
    return None


def _wrong_params(config: ConfigFacts) -> Iterator[_Wrong]:
    """Numbers in quotes among the parameters of optimizer and scheduler, which go to a constructor as they are."""
    for section in ("optimizer", "scheduler"):
        given = config.value(f"{section}.params")
        for name, value in given.items() if isinstance(given, Mapping) else ():
            path = f"{section}.params.{name}"
            swallowed = _swallowed(config, path, value)
            if swallowed is not None:
                yield swallowed
            elif isinstance(value, str) and value != "auto" and name not in _TEXT_PARAMS:
                yield from _text_param(path, value)


def _text_param(path: str, value: str) -> Iterator[_Wrong]:
    """A number, a truth value or a list of numbers that is written as a text."""
    meant = of_text(value, "float")
    meant = as_bool(value) if meant is None else meant
    if meant is not None:
        yield _Wrong(path=path, what=f"is the text {as_json(value)}, not a number or truth value", meant=meant)
    elif re.fullmatch(r"[(\[][\s\d.,eE+-]+[)\]]", value):
        what = f"is the text {as_json(value)}, not a list; JSON writes lists in square brackets, without quotes"
        yield _Wrong(path=path, what=what, meant=literal(value, None))


DIAGNOSES: tuple[Diagnosis, ...] = (WrongType(),)
