"""What is known of one ds_config: its values, where each stands in the file, and what it is judged against.

Plain data without I/O; `dsconfig.load` makes it. A key path is dotted (`zero_optimization.offload_param.device`);
lines and columns count from 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Framework = Literal["deepspeed", "transformers", "accelerate", "lightning"]


@dataclass(frozen=True, kw_only=True)
class Position:
    """A place in the config file; both numbers count from 1."""

    line: int
    column: int


@dataclass(frozen=True, kw_only=True)
class ConfigSyntaxError:
    """Why the file cannot be read as a ds_config. `text` is the source line it is about, without its line end.

    `instead` says what to do where it is not to mend that line.
    """

    message: str
    line: int
    column: int
    text: str = ""
    instead: str | None = None


@dataclass(frozen=True, kw_only=True)
class DuplicateKey:
    """A key that stands more than once in the same object, at each of `positions`."""

    key: str
    positions: tuple[Position, ...]


@dataclass(frozen=True, kw_only=True)
class ConfigFacts:
    """One ds_config.

    `data` is empty where `syntax_error` is set. `positions` maps a dotted key to the place of the key in the file and
    is empty for a config that came as a dict. `quoteless` are the dotted keys whose text has no quotes around it.
    `json_error` says why `json.load` refuses a file that DeepSpeed's own HJSON reader takes. `release` is the DeepSpeed
    version it is judged against, `table_release` the one whose schema is used for that (the nearest older one known).
    `world_size` is None where the number of ranks is not known. `framework` is who hands the config to DeepSpeed, None
    where that is not known. `hf_arguments` are the values of Hugging Face's TrainingArguments on the script's command
    line, None where the script is not known to use them. `derived` says that the file is not the ds_config itself but a
    config of Accelerate's own, so that the keys are not the file's.
    """

    path: str
    data: Mapping[str, Any] = field(default_factory=dict)
    source_lines: tuple[str, ...] = ()
    positions: Mapping[str, Position] = field(default_factory=dict)
    duplicates: tuple[DuplicateKey, ...] = ()
    quoteless: frozenset[str] = frozenset()
    syntax_error: ConfigSyntaxError | None = None
    json_error: ConfigSyntaxError | None = None
    release: str = ""
    table_release: str = ""
    world_size: int | None = None
    framework: Framework | None = None
    hf_arguments: Mapping[str, Any] | None = None
    derived: bool = False

    def where(self, key: str) -> Position | None:
        """Where the key stands, or None for a key that the file does not have."""
        return self.positions.get(key)

    def value(self, key: str, default: Any = None) -> Any:
        """What the config itself says for a dotted key, `default` where it says nothing."""
        node: Any = self.data
        for part in key.split("."):
            if not isinstance(node, Mapping) or part not in node:
                return default
            node = node[part]
        return node

    def has(self, key: str) -> bool:
        """Whether the config says anything for a dotted key."""
        return self.value(key, _MISSING) is not _MISSING


_MISSING = object()
