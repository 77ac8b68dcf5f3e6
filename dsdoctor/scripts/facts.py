"""The calls of a script, as plain data without I/O; `scripts.read` makes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call in the script's text.

    `name` is the last part of what is called (`from_pretrained`), `owner` what stands before it, as written, or the
    module that a bare name was imported from. `scope` is the dotted name of the function it stands in, "" at module
    level. `literals` are the keyword arguments whose values are constants, `given` the names of all; `arguments` the
    positional ones, as written, `first` the value of the first one if that is a text. `targets` are the names that the
    result is bound to, in order. `contexts` are the calls of the `with` statements around it. `open` says that more
    arguments may come by `*` or `**`.
    """

    name: str
    owner: str = ""
    line: int
    column: int = 1
    text: str = ""
    scope: str = ""
    literals: Mapping[str, Any] = field(default_factory=dict)
    given: Mapping[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    first: str | None = None
    targets: tuple[str, ...] = ()
    contexts: tuple[str, ...] = ()
    open: bool = False


@dataclass(frozen=True, kw_only=True)
class ScriptFacts:
    """One script: its calls in the order of the text. `problem` says why it could not be parsed."""

    path: str
    calls: tuple[Call, ...] = ()
    problem: str | None = None

    def named(self, *names: str) -> Iterator[Call]:
        """The calls of these names."""
        return (call for call in self.calls if call.name in names)

    def calls_any(self, *names: str) -> bool:
        return next(self.named(*names), None) is not None

    @property
    def training_arguments(self) -> Call | None:
        """The one construction of Hugging Face's TrainingArguments (or a subclass named like it), if there is one."""
        made = [call for call in self.calls if call.name.endswith("TrainingArguments") or call.name == "SFTConfig"]
        return made[0] if len(made) == 1 else None
