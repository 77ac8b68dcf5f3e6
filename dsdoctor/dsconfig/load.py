"""Load a ds_config: a file with positions, or a dict as it is.

Whatever is wrong inside the file is data (`syntax_error`, `duplicates`); only a file that cannot be read at all raises.
"""

from __future__ import annotations

import bisect
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dsdoctor.dsconfig import accelerate, mistaken, reader, yaml_text
from dsdoctor.dsconfig.facts import ConfigFacts, ConfigSyntaxError, DuplicateKey, Framework, Position
from dsdoctor.dsconfig.hf_arguments import parse
from dsdoctor.dsconfig.schema import table_release
from dsdoctor.dsconfig.yaml_text import YamlUnreadable

_LARGEST = 16 * 2**20
"""Bytes; no ds_config is that large, and reading model weights as text would take for ever."""
_BLANK = "\ufeff \t\r\n"
_GIVE_ONE = "give the ds_config"
_WRITE_ONE = "write a ds_config; --new does"
_NO_OBJECT = "a ds_config is an object, this file holds "
_OTHERS = {
    ".py": ("Python", "write the dict to a file with json.dump, and give that"),
    ".sh": ("a shell script", "give the file that it passes to DeepSpeed"),
    ".toml": ("TOML", "write it as JSON"),
}
"""Files whose suffix says what they are, and what to do instead."""
GIVEN_AS_DICT = "<dict>"
"""`ConfigFacts.path` of a config that came as a dict."""


class ConfigUnreadable(Exception):
    """The config file is missing, a folder, or not allowed to be read; `str()` is one line for the user."""


def load_config(
    config: str | Path | Mapping[str, Any],
    *,
    release: str = "",
    world_size: int | None = None,
    framework: Framework | None = None,
    script_args: Sequence[str] = (),
    hf_arguments: Mapping[str, Any] | None = None,
) -> ConfigFacts:
    """Load a file or a dict and say what it is judged against.

    `release` is the DeepSpeed version, "" for an unknown one (the newest table is used). `script_args` are the words
    after the script's name, `hf_arguments` what is known of TrainingArguments beside them; both count where
    `framework` is transformers. A config of Accelerate's own settles framework and world size where they are not given.

    Raises ConfigUnreadable for a file that cannot be read.
    """
    text = _Text(data=dict(config)) if isinstance(config, Mapping) else _read_file(Path(config))
    if text.plugin is not None:
        framework, world_size = framework or "accelerate", world_size or text.plugin.ranks
    return ConfigFacts(
        path=_path(config, text),
        data=text.data,
        source_lines=text.lines,
        positions=text.positions,
        duplicates=text.duplicates,
        quoteless=text.quoteless,
        syntax_error=text.syntax_error,
        json_error=text.json_error,
        release=release,
        table_release=table_release(release),
        world_size=world_size,
        framework=framework,
        hf_arguments={**(hf_arguments or {}), **parse(script_args)} if framework == "transformers" else None,
        derived=text.plugin is not None,
    )


def load_data(path: str | Path) -> dict[str, Any]:
    """What the file holds, for those who only work by it. Raises ConfigUnreadable, for a syntax error too."""
    facts = load_config(path)
    error = facts.syntax_error
    if error is not None:
        place = f"line {error.line}, column {error.column}"
        raise ConfigUnreadable(f"cannot read the ds_config {path}: {place}: {error.message}")
    return dict(facts.data)


def with_text(facts: ConfigFacts, text: str) -> ConfigFacts:
    """The same job with another text of its config."""
    read = parse_text(text)
    return replace(
        facts,
        data=read.data,
        source_lines=read.lines,
        positions=read.positions,
        duplicates=read.duplicates,
        quoteless=read.quoteless,
        syntax_error=read.syntax_error,
        json_error=read.json_error,
    )


def _path(config: str | Path | Mapping[str, Any], text: _Text) -> str:
    """Where the keys stand: a config of Accelerate's own may only name the file."""
    named = text.plugin.config_file if text.plugin is not None else None
    return GIVEN_AS_DICT if isinstance(config, Mapping) else named or str(config)


@dataclass(frozen=True, kw_only=True)
class _Text:
    """What a file holds."""

    data: dict[str, Any] = field(default_factory=dict)
    lines: tuple[str, ...] = ()
    positions: Mapping[str, Position] = field(default_factory=dict)
    duplicates: tuple[DuplicateKey, ...] = ()
    quoteless: frozenset[str] = frozenset()
    syntax_error: ConfigSyntaxError | None = None
    json_error: ConfigSyntaxError | None = None
    plugin: accelerate.Plugin | None = None
    """Set for a config of Accelerate's own."""


def _read_file(path: Path) -> _Text:
    try:
        if path.stat().st_size > _LARGEST:
            raise ConfigUnreadable(f"{path} has {path.stat().st_size} bytes: not a ds_config")
        raw = path.read_bytes()
    except FileNotFoundError:
        raise ConfigUnreadable(f"no such ds_config: {path}") from None
    except IsADirectoryError:
        raise ConfigUnreadable(f"the ds_config is a folder: {path}") from None
    except (OSError, ValueError) as error:
        raise ConfigUnreadable(f"cannot read the ds_config {path}: {error}") from None
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        return _Text(syntax_error=_not_utf8(raw, error))
    if path.suffix.lower() in (".yaml", ".yml"):
        return _read_yaml(path, text)
    read = parse_text(text)
    if read.syntax_error is not None and path.suffix.lower() in _OTHERS:
        what, instead = _OTHERS[path.suffix.lower()]
        return _no_ds_config(text, f"this is {what}; a ds_config is JSON", instead)
    return _converted(read, read.data) or _given_by_mistake(text, read.data) or read


def _read_yaml(path: Path, text: str) -> _Text:
    """An Accelerate config with DeepSpeed's part in it, or YAML by mistake."""
    lines = tuple(line.rstrip("\r") for line in text.split("\n"))
    try:
        data = yaml_text.load(text)
        places = {key: Position(line=line, column=column) for key, (line, column) in yaml_text.positions(text).items()}
    except YamlUnreadable as error:
        raise ConfigUnreadable(f"cannot read {path}: {error}") from None
    converted = _converted(_Text(lines=lines, positions=places), data)
    if converted is not None:
        return converted
    return _given_by_mistake(text, data) or _no_ds_config(text, "this is YAML; a ds_config is JSON", "write it as JSON")


def _given_by_mistake(text: str, data: Any) -> _Text | None:
    """Another file than a ds_config, told by its keys; None for anything else."""
    found = mistaken.told(data)
    return _no_ds_config(text, found.what, found.instead) if found is not None else None


def _no_ds_config(text: str, message: str, instead: str) -> _Text:
    """A file that is no ds_config as a whole, pointed at by its first line that is not blank."""
    lines = tuple(line.rstrip("\r") for line in text.split("\n"))
    begin = len(text) - len(text.lstrip(_BLANK))
    offset = text.rfind("\n", 0, begin) + 1 if begin < len(text) else 0
    return _Text(lines=lines, syntax_error=replace(_error_at(text, offset, message), instead=instead))


def _converted(text: _Text, data: Any) -> _Text | None:
    """The text with the ds_config that Accelerate makes of its own config; None for anything else."""
    plugin = accelerate.plugin(data)
    if plugin is None:
        return None
    if plugin.config_file is not None:
        try:
            return replace(_read_file(Path(plugin.config_file)), plugin=plugin)
        except ConfigUnreadable as error:
            raise ConfigUnreadable(f"{error}, named by the config of Accelerate") from None
    places = {key: text.positions[name] for key, name in plugin.names.items() if name in text.positions}
    return _Text(data=dict(plugin.config), lines=text.lines, positions=places, plugin=plugin)


def parse_text(text: str) -> _Text:
    """Read the text of a config file."""
    lines = tuple(line.rstrip("\r") for line in text.split("\n"))
    begin = len(text) - len(text.lstrip(_BLANK))
    if text[begin : begin + 1] == "[":  # told by its first character: a list can be as long as a data set
        return _no_ds_config(text, _NO_OBJECT + "a list", _GIVE_ONE)
    try:
        reading = reader.read(text)
    except reader.HjsonError as error:
        if begin == len(text):
            return _no_ds_config(text, "the file is empty", _WRITE_ONE)
        return _Text(lines=lines, syntax_error=_error_at(text, error.offset, error.message))
    if not isinstance(reading.value, dict):
        return _no_ds_config(text, _NO_OBJECT + _name_of(reading.value), _GIVE_ONE)
    place = _Places(text)
    return _Text(
        data=reading.value,
        lines=lines,
        positions={key: place.of(offset) for key, offset in reading.offsets.items()},
        duplicates=tuple(
            DuplicateKey(key=key, positions=tuple(place.of(offset) for offset in offsets))
            for key, offsets in reading.duplicates.items()
        ),
        quoteless=frozenset(reading.quoteless),
        json_error=_json_error(text),
    )


class _Places:
    """Turns offsets into lines and columns."""

    def __init__(self, text: str) -> None:
        self.starts = [0, *(match.end() for match in re.finditer("\n", text))]

    def of(self, offset: int) -> Position:
        line = bisect.bisect_right(self.starts, offset)
        return Position(line=line, column=offset - self.starts[line - 1] + 1)


def _error_at(text: str, offset: int, message: str) -> ConfigSyntaxError:
    place = _Places(text).of(offset)
    line = text.split("\n")[place.line - 1].rstrip("\r").lstrip("\ufeff")
    return ConfigSyntaxError(message=message, line=place.line, column=place.column, text=line)


def _json_error(text: str) -> ConfigSyntaxError | None:
    """Why strict JSON refuses the text, None where it takes it."""
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        return _error_at(text, error.pos, error.msg)
    except RecursionError:
        return _error_at(text, 0, "nested too deeply")
    return None


def _not_utf8(raw: bytes, error: UnicodeDecodeError) -> ConfigSyntaxError:
    before = raw[: error.start]
    line = before.count(b"\n") + 1
    column = error.start - (before.rfind(b"\n") + 1) + 1
    instead = None
    if raw[:2] in (b"\xff\xfe", b"\xfe\xff"):
        message = "the file is UTF-16; save it as UTF-8"
    elif b"\0" in raw:
        message, instead = "this is no text file; a ds_config is JSON", _GIVE_ONE
    else:
        message = f"byte 0x{raw[error.start]:02x} is not UTF-8; save the file as UTF-8"
    shown = raw.split(b"\n")[line - 1].decode("utf-8", errors="replace").rstrip("\r")
    return ConfigSyntaxError(message=message, line=line, column=column, text=shown, instead=instead)


def _name_of(value: Any) -> str:
    if value is None:
        return "null"
    return {list: "a list", str: "text", bool: "true or false"}.get(type(value), "a number")
