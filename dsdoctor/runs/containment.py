"""Where the script's checkpoints go while it is being examined: into the run's folder, not over the user's files.

The script runs many times, so what it saves under its own paths is led to the same path below `saved/` of the run;
what it then loads from there in the same run is found there. The mapping follows from the path alone, so that all
ranks agree on it. Paths in the system's temp folder are left alone, unless the script works there.
"""

from __future__ import annotations

import functools
import inspect
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dsdoctor.runs import run_config
from dsdoctor.runs.session import RankSession
from dsdoctor.runs.spec import saved_path

_OUTSIDE = "outside"
"""Folder below `saved/` for absolute paths outside the working directory."""
_NOT_FILES = (Path("/dev"), Path("/proc"), Path("/sys"))


class Containment:
    """Leads writes away, and reads to where the writes went."""

    def __init__(self, session: RankSession) -> None:
        spec = session.spec
        self._session = session
        self._home = Path(os.path.abspath(spec.cwd))
        self._saved = Path(os.path.abspath(saved_path(spec.folder)))
        self._run = Path(os.path.abspath(spec.folder))
        projects = [self._home]
        if not spec.as_module:
            projects.append((self._home / spec.script).parent)
        self._projects = tuple(projects)
        self._told: set[tuple[str, str]] = set()

    def target(self, path: str | os.PathLike[str], what: str, *, makes_folders: bool = True) -> str:
        """Where to write instead; the path itself where it may be written to.

        A function that does not make its folders (`makes_folders=False`) must still fail for a missing one.
        """
        given = os.fspath(path)
        full = self._full(given)
        if not self._contained(full, given):
            return given
        replacement = self._mapped(full)
        if not makes_folders and not full.parent.is_dir() and not replacement.parent.is_dir():
            return given
        replacement.parent.mkdir(parents=True, exist_ok=True)
        if (what, given) not in self._told:
            self._told.add((what, given))
            self._session.trace.contained(what, given, str(replacement))
        return str(replacement)

    def found(self, path: str | os.PathLike[str], inside: str = "") -> str:
        """Where to read from: where this run wrote that path (and, in a folder, the entry `inside`), else as given."""
        given = os.fspath(path)
        full = self._full(given)
        if self._contained(full, given) and (self._mapped(full) / inside).exists():
            return str(self._mapped(full))
        return given

    def original(self, path: str | os.PathLike[str]) -> str:
        """The script's path for one that `target` gave; other paths unchanged."""
        full = Path(os.path.abspath(path))
        if not full.is_relative_to(self._saved):
            return os.fspath(path)
        inner = full.relative_to(self._saved)
        if inner.parts[:1] == (_OUTSIDE,):
            return str(Path("/", *inner.parts[1:]))
        return str(self._home / inner)

    def redirect(self, owner: Any, name: str, argument: str, what: str, *, makes_folders: bool = True) -> None:
        """Make a function or method write below the run's folder: `argument` is the path it takes."""
        self._change_path(owner, name, argument, lambda path, _: self.target(path, what, makes_folders=makes_folders))

    def resolve(self, owner: Any, name: str, argument: str) -> None:
        """Make a function or method read what this run wrote, where it wrote the path that it is asked for."""
        self._change_path(owner, name, argument, lambda path, _: self.found(path))

    def contain_engine(self, engine: Any) -> None:
        """Checkpoints of the engine, in the classes that define how they are written and read."""
        for kind in type(engine).__mro__:
            for name in ("save_checkpoint", "save_16bit_model", "save_fp16_model"):
                if name in vars(kind):
                    self.redirect(kind, name, "save_dir", f"engine.{name}")
            if "load_checkpoint" in vars(kind):
                self._change_path(kind, "load_checkpoint", "load_dir", self._checkpoint)

    def contain_config(self, config: dict[str, Any]) -> None:
        """Change, in a copy of the ds_config, where DeepSpeed's own monitors write."""
        for section, key, path in run_config.written_paths(config):
            config[section][key] = self.target(os.path.expanduser(path), f"{section}.{key}")

    def _checkpoint(self, path: str | os.PathLike[str], arguments: dict[str, Any]) -> str:
        return self.found(path, str(arguments.get("tag") or "latest"))

    def _change_path(
        self,
        owner: Any,
        name: str,
        argument: str,
        change: Callable[[str | os.PathLike[str], dict[str, Any]], str],
    ) -> None:
        original = vars(owner).get(name)
        bare = original.__func__ if isinstance(original, (classmethod, staticmethod)) else original
        if bare is None or hasattr(bare, "_dsdoctor_contained"):
            return
        signature = inspect.signature(bare)

        @functools.wraps(bare)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            with self._session.guard(f"contain {name}"):
                args, kwargs = _with_changed_path(signature, argument, change, args, kwargs)
            return bare(*args, **kwargs)

        wrapper._dsdoctor_contained = True  # type: ignore[attr-defined]
        self._session.patch(owner, name, type(original)(wrapper) if bare is not original else wrapper)

    def _contained(self, full: Path, given: str) -> bool:
        if "://" in given or full.is_relative_to(self._run) or any(full.is_relative_to(p) for p in _NOT_FILES):
            return False
        if any(full.is_relative_to(project) for project in self._projects):
            return True
        return not full.is_relative_to(os.path.abspath(tempfile.gettempdir()))

    def _mapped(self, full: Path) -> Path:
        if full.is_relative_to(self._home):
            return self._saved / full.relative_to(self._home)
        return self._saved / _OUTSIDE / full.relative_to(full.anchor)

    def _full(self, path: str) -> Path:
        return Path(os.path.abspath(path))


def _with_changed_path(
    signature: inspect.Signature,
    argument: str,
    change: Callable[[str | os.PathLike[str], dict[str, Any]], str],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The call with `argument` changed where it is a path; streams, and calls that do not fit, as they are."""
    try:
        call = signature.bind(*args, **kwargs)
    except TypeError:
        return args, kwargs
    path = call.arguments.get(argument)
    if not isinstance(path, (str, os.PathLike)):
        return args, kwargs
    call.arguments[argument] = change(path, call.arguments)
    return call.args, call.kwargs
