"""What the parts inside one rank share: the order, the trace, and the list of what to undo.

Runs in rank processes only; imports no torch.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from dsdoctor.runs import run_config
from dsdoctor.runs.engine_facts import Framework
from dsdoctor.runs.spec import RunSpec
from dsdoctor.runs.trace import TraceWriter

_ABSENT = object()


class _HandedOut(NamedTuple):
    """A config that a framework got from us, as it is now and as it was then."""

    config: dict[str, Any]
    before: dict[str, Any]
    framework: Framework


class RankSession:
    """The observation of one rank: everything that is changed in the process goes through `patch` and is undone."""

    def __init__(self, spec: RunSpec, trace: TraceWriter, rank: int, local_rank: int, world_size: int) -> None:
        self.spec = spec
        self.trace = trace
        self.rank = rank
        self.local_rank = local_rank
        self.world_size = world_size
        self.pid = os.getpid()
        self.step: int | None = None
        """Optimizer steps attempted so far; None before there is an engine."""
        self.stopped = False
        """dsdoctor has ended the run; what the script does from here on proves nothing."""
        self._handed_out: list[_HandedOut] = []
        self._noted: set[str] = set()
        self._undo: list[Callable[[], None]] = []

    def note(self, text: str) -> None:
        """Say once what was changed for this run."""
        if text not in self._noted:
            self._noted.add(text)
            self.trace.note(text)

    def config(self) -> dict[str, Any]:
        """A copy of the ordered ds_config in the precision of this run, to put in place of the script's."""
        given = self.spec.config
        return run_config.in_fp32(given) if self.spec.precision == "fp32" else copy.deepcopy(given)

    def hand_out(self, config: dict[str, Any], framework: Framework) -> None:
        """Remember a config that a framework got from us and now fills in ("auto"), to know it again later."""
        self._handed_out.append(_HandedOut(config, copy.deepcopy(config), framework))

    def is_frameworks_copy(self, config: object) -> bool:
        """Whether a framework's config class is given what the framework made of our config: it keeps copies as dicts,
        where a script's own config comes before anything was handed out, or as a file.
        """
        return isinstance(config, dict) and bool(self._handed_out)

    def filled_in_by(self, config: object) -> Framework | None:
        """The framework that got this very object from us; None for any other config."""
        return next((each.framework for each in self._handed_out if each.config is config), None)

    def as_handed_out(self, config: object) -> dict[str, Any]:
        """What that object was before the framework filled it in; empty for any other config."""
        return next((each.before for each in self._handed_out if each.config is config), {})

    @contextmanager
    def guard(self, doing: str) -> Iterator[None]:
        """Work of ours whose failure must not reach the user's script: it becomes a note."""
        try:
            yield
        except Exception as error:
            self.note(f"dsdoctor could not {doing}: {type(error).__name__}: {error}")

    def patch(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute of a class or module until `undo`."""
        before = vars(owner).get(name, _ABSENT)

        def restore() -> None:
            if before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)

        setattr(owner, name, value)
        self._undo.append(restore)

    def at_undo(self, work: Callable[[], None]) -> None:
        """Have something else done when everything is put back."""
        self._undo.append(work)

    def undo(self) -> None:
        """Put back everything that was patched, last first."""
        while self._undo:
            with self.guard("undo a patch"):
                self._undo.pop()()
