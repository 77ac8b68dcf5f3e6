"""What a DeepSpeed release accepts in a ds_config: sections, keys, types, defaults, bounds, what was removed.

The table `deepspeed_schema.json` was read from DeepSpeed itself by `tests/tools/make_schema.py`. It holds the oldest
release in full and every later one as a merge patch of the one before. A release that is not in it is judged by what
`dsconfig.learned` has read from an install, else by the nearest older one (by the oldest where it is older than all).
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import resources
from typing import Any

from dsdoctor.dsconfig import learned
from dsdoctor.dsconfig.release import version_key


@dataclass(frozen=True, kw_only=True)
class Key:
    """One key of a section.

    `kind` is bool, int, float, str, list, dict, section or any; `default` None where there is none; `also` is a second
    spelling that is accepted. `choices` are the values it takes (of a list: its items). `refuses` are the shapes of
    values (`dsconfig.shapes`) that raise whatever stands beside the key. `successor` is set for a deprecated key: the
    dotted key (or words) to use instead.
    """

    path: str
    kind: str
    default: Any = None
    nullable: bool = False
    choices: tuple[Any, ...] = ()
    bounds: Mapping[str, float] = field(default_factory=dict)
    also: str | None = None
    successor: str | None = None
    also_bool: bool = False
    refuses: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Section:
    """One object of the config. `forbids` says that keys it does not know are refused, else they are ignored.

    `typed` sections are pydantic models: strings that spell a value are converted, and "auto" falls back to the
    default. Elsewhere the value is used as it stands.
    """

    path: str
    forbids: bool
    typed: bool
    keys: Mapping[str, Key]

    def key(self, name: str) -> Key | None:
        """The key by either of its spellings."""
        found = self.keys.get(name)
        return found or next((key for key in self.keys.values() if key.also == name), None)

    def names(self) -> tuple[str, ...]:
        return tuple(self.keys) + tuple(key.also for key in self.keys.values() if key.also)


@dataclass(frozen=True, kw_only=True)
class Signature:
    """The constructor of an optimizer or scheduler; `open` takes any keyword."""

    name: str
    params: tuple[str, ...]
    open: bool = False


@dataclass(frozen=True, kw_only=True)
class Schema:
    """All that one release accepts. `removed` maps a dotted key that it refuses by name to DeepSpeed's reason."""

    release: str
    sections: Mapping[str, Section]
    removed: Mapping[str, str]
    optimizer_names: tuple[str, ...]
    optimizers: Mapping[str, Signature]
    schedulers: Mapping[str, Signature]
    torch_optimizers: Mapping[str, Signature]
    torch_schedulers: Mapping[str, Signature]

    def key(self, path: str) -> Key | None:
        """The key of a dotted path, by either spelling; None where the release does not know it."""
        section, _, name = path.rpartition(".")
        found = self.sections.get(section)
        return found.key(name) if found else None

    def default(self, path: str) -> Any:
        """The default that the table holds for a dotted key, None where it has none."""
        key = self.key(path)
        return key.default if key else None


@lru_cache(maxsize=1)
def _document() -> dict[str, Any]:
    text = resources.files("dsdoctor.dsconfig").joinpath("deepspeed_schema.json").read_text(encoding="utf-8")
    document: dict[str, Any] = json.loads(text)
    return document


@lru_cache(maxsize=1)
def _learned() -> dict[str, dict[str, Any]]:
    known = set(_document()["order"])
    return {release: table for release, table in learned.tables().items() if release not in known}


@lru_cache(maxsize=1)
def releases() -> tuple[str, ...]:
    """The DeepSpeed releases that are known, oldest first."""
    return tuple(sorted((*_document()["order"], *_learned()), key=version_key))


def forget() -> None:
    """Look again at what has been learned, the next time."""
    for cached in (_learned, releases, table_release, _schema):
        cached.cache_clear()


def learn() -> str | None:
    """Read the installed release, to be judged by its own schema from now on; None, or in one line why not."""
    problem = learned.learn()
    forget()
    return problem


@lru_cache(maxsize=32)
def table_release(release: str) -> str:
    """The release whose table is used for `release`: itself, the nearest older one, the newest for an unknown one."""
    known = releases()
    wanted = version_key(release)
    if not wanted:
        return known[-1]
    older = [name for name in known if version_key(name) <= wanted]
    return older[-1] if older else known[0]


def schema_for(release: str) -> Schema:
    """The schema that `release` is judged by (see `table_release`)."""
    return _schema(table_release(release))


@lru_cache(maxsize=32)
def _schema(release: str) -> Schema:
    table = _table(release)
    return Schema(
        release=release,
        sections={path: _section(path, entry) for path, entry in table["sections"].items()},
        removed=table["removed"],
        optimizer_names=tuple(table["optimizers"]["names"]),
        optimizers=_signatures(table["optimizers"]["classes"]),
        schedulers=_signatures(table["schedulers"]),
        torch_optimizers=_signatures(_document()["torch"]["optimizers"]),
        torch_schedulers=_signatures(_document()["torch"]["schedulers"]),
    )


def _table(release: str) -> Mapping[str, Any]:
    return _learned().get(release) or shipped()[release]


@lru_cache(maxsize=1)
def shipped() -> dict[str, Mapping[str, Any]]:
    """The tables of all shipped releases. Later ones share parts with earlier ones: nothing here is written to."""
    tables: dict[str, Mapping[str, Any]] = {}
    last: Mapping[str, Any] = {}
    for name in _document()["order"]:
        last = tables[name] = _changed(last, _document()["releases"][name])
    return tables


def _changed(old: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """`patch.apply` without the copies, which would take longer than all else."""
    result = dict(old)
    for name, value in change.items():
        if value is None:
            result.pop(name, None)
        else:
            before = result.get(name)
            is_object = isinstance(value, Mapping)
            result[name] = _changed(before if isinstance(before, Mapping) else {}, value) if is_object else value
    return result


def _section(path: str, entry: Mapping[str, Any]) -> Section:
    keys = {name: _key(f"{path}.{name}" if path else name, value) for name, value in entry["keys"].items()}
    return Section(path=path, forbids=entry["extra"] == "forbid", typed=entry["typed"], keys=keys)


def _key(path: str, entry: Mapping[str, Any]) -> Key:
    return Key(
        path=path,
        kind=entry["kind"],
        default=entry.get("default"),
        nullable=entry.get("nullable", False),
        choices=tuple(entry.get("choices", ())),
        bounds={bound: entry[bound] for bound in ("ge", "gt", "le", "lt") if bound in entry},
        also=entry.get("also"),
        successor=entry.get("deprecated"),
        also_bool=entry.get("also_bool", False),
        refuses=frozenset(entry.get("refuses", "").split()),
    )


def _signatures(entries: Mapping[str, Any]) -> dict[str, Signature]:
    return {
        name: Signature(name=name, params=tuple(entry["params"]), open=entry.get("open", False))
        for name, entry in entries.items()
    }


def releases_with(path: str) -> tuple[str, ...]:
    """The releases of the table that know a dotted key, oldest first; empty if none does."""
    section, _, name = path.rpartition(".")
    return tuple(release for release in releases() if _has(_table(release)["sections"].get(section), name))


def _has(section: Mapping[str, Any] | None, name: str) -> bool:
    """Whether a section of a table knows a name, by either spelling."""
    entries = section["keys"] if section is not None else {}
    return name in entries or any(entry.get("also") == name for entry in entries.values())


def nearest(name: str, candidates: Iterable[str]) -> str | None:
    """The candidate that `name` is most likely a misspelling of, None where none is close."""
    plain = {_letters(candidate): candidate for candidate in candidates}
    if _letters(name) in plain:
        return plain[_letters(name)]
    cutoff = 0.82 if len(_letters(name)) > 7 else 0.88  # short words are close to each other by chance
    close = difflib.get_close_matches(_letters(name), list(plain), n=1, cutoff=cutoff)
    return plain[close[0]] if close else None


def _letters(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "").replace(" ", "")
