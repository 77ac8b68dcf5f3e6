"""Work to do right after a module has been imported by the user's script, before the script sees its names.

The script must be the one that imports torch, DeepSpeed and their kin (settings at the top of it would come too late
otherwise), so nothing is patched before: `ImportHooks` sits at the head of `sys.meta_path`, lets the other finders
find the module, and runs the callbacks as soon as its code has run. So `from deepspeed import initialize` gets the
patched function too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

Callback = Callable[[ModuleType], None]


class ImportHooks(MetaPathFinder):
    """Post-import callbacks. A callback that raises is reported to `on_error`, the import succeeds all the same."""

    def __init__(self, on_error: Callable[[str, Exception], None]) -> None:
        self._on_error = on_error
        self._callbacks: dict[str, list[Callback]] = {}

    def install(self) -> None:
        sys.meta_path.insert(0, self)

    def remove(self) -> None:
        """Take the hooks out; modules that are imported later are left alone."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def after_import(self, name: str, callback: Callback) -> None:
        """Run `callback(module)` once the module is imported; now, where it is already."""
        module = sys.modules.get(name)
        if module is not None:
            self._call(name, callback, module)
        else:
            self._callbacks.setdefault(name, []).append(callback)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec that another finder has for a module that we wait for, made to report; None for all others."""
        if fullname not in self._callbacks:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            if finder is self or find is None:
                continue
            spec = find(fullname, path, target)
            if isinstance(spec, ModuleSpec):
                self._report_when_executed(fullname, spec)
                return spec
        return None

    def _report_when_executed(self, name: str, spec: ModuleSpec) -> None:
        """Wrap `exec_module` on this one loader object, so that all else that a loader can do stays as it is."""
        loader = spec.loader
        execute = getattr(loader, "exec_module", None)
        if loader is None or execute is None or not hasattr(loader, "__dict__"):
            return

        def exec_module(module: ModuleType) -> None:
            vars(loader).pop("exec_module", None)
            execute(module)
            self._run_callbacks(name, sys.modules.get(name, module))

        loader.exec_module = exec_module  # type: ignore[method-assign]

    def _run_callbacks(self, name: str, module: ModuleType) -> None:
        for callback in self._callbacks.pop(name, []):
            self._call(name, callback, module)

    def _call(self, name: str, callback: Callback, module: ModuleType) -> None:
        try:
            callback(module)
        except Exception as error:
            self._on_error(name, error)
