"""Post-import hooks: in time, once, and without a trace in the module."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from dsdoctor.runs.imports import ImportHooks


@pytest.fixture
def errors() -> list[tuple[str, Exception]]:
    return []


@pytest.fixture
def hooks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, errors: list[tuple[str, Exception]]
) -> Iterator[ImportHooks]:
    (tmp_path / "hooked_pkg").mkdir()
    (tmp_path / "hooked_pkg" / "__init__.py").write_text("from hooked_pkg.inner import value\n")
    (tmp_path / "hooked_pkg" / "inner.py").write_text("def value():\n    return 'original'\n")
    (tmp_path / "hooked_bad.py").write_text("raise RuntimeError('broken module')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    hooks = ImportHooks(lambda name, error: errors.append((name, error)))
    hooks.install()
    yield hooks
    hooks.remove()
    for name in [name for name in sys.modules if name.startswith("hooked_")]:
        del sys.modules[name]


def replace_value(module: ModuleType) -> None:
    module.value = lambda: "patched"  # type: ignore[attr-defined]


def test_patch_is_in_place_before_names_are_handed_out(hooks: ImportHooks) -> None:
    hooks.after_import("hooked_pkg.inner", replace_value)
    package = importlib.import_module("hooked_pkg")
    assert package.value() == "patched", "the package took the name while it was being imported"


def test_callback_runs_once_and_only_after_the_code(hooks: ImportHooks) -> None:
    seen: list[bool] = []
    hooks.after_import("hooked_pkg", lambda module: seen.append(hasattr(module, "value")))
    importlib.import_module("hooked_pkg")
    importlib.import_module("hooked_pkg")
    assert seen == [True]


def test_module_that_is_there_already_is_handled_at_once(hooks: ImportHooks) -> None:
    importlib.import_module("hooked_pkg.inner")
    hooks.after_import("hooked_pkg.inner", replace_value)
    assert sys.modules["hooked_pkg.inner"].value() == "patched"


def test_error_of_a_callback_is_reported_and_the_import_succeeds(
    hooks: ImportHooks, errors: list[tuple[str, Exception]]
) -> None:
    def fail(_: ModuleType) -> None:
        raise LookupError("ours")

    hooks.after_import("hooked_pkg.inner", fail)
    hooks.after_import("hooked_pkg.inner", replace_value)
    assert importlib.import_module("hooked_pkg.inner").value() == "patched", "the next callback still runs"
    assert [(name, str(error)) for name, error in errors] == [("hooked_pkg.inner", "ours")]


def test_error_of_the_module_is_its_own(hooks: ImportHooks) -> None:
    seen: list[ModuleType] = []
    hooks.after_import("hooked_bad", seen.append)
    with pytest.raises(RuntimeError, match="broken module"):
        importlib.import_module("hooked_bad")
    assert seen == []


def test_missing_module_is_still_missing(hooks: ImportHooks) -> None:
    hooks.after_import("hooked_absent", replace_value)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("hooked_absent")


def test_module_looks_as_if_nothing_had_happened(hooks: ImportHooks, tmp_path: Path) -> None:
    hooks.after_import("hooked_pkg.inner", lambda _: None)
    module = importlib.import_module("hooked_pkg.inner")
    assert module.__file__ == str(tmp_path / "hooked_pkg" / "inner.py")
    assert inspect.getsource(module.value) == "def value():\n    return 'original'\n"
    assert "exec_module" not in vars(module.__loader__)


def test_removed_hooks_leave_later_imports_alone(hooks: ImportHooks) -> None:
    hooks.after_import("hooked_pkg.inner", replace_value)
    hooks.remove()
    assert importlib.import_module("hooked_pkg.inner").value() == "original"
