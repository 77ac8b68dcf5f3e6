from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import pytest
from torch.utils.file_baton import FileBaton

from dsdoctor.runs import extensions


def test_versions_and_accelerators_have_caches_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"torch": "2.13.0+cu130", "deepspeed": "0.19.8"}
    monkeypatch.setattr(extensions, "installed", versions.__getitem__)
    python = f"py{sys.version_info.major}.{sys.version_info.minor}"
    expected = extensions.cache_folder(root=tmp_path)
    assert expected.parent == tmp_path / "extensions"
    assert expected.name.startswith(f"{python}-torch2.13.0+cu130-deepspeed0.19.8-auto-")

    assert extensions.cache_folder("cpu", root=tmp_path) != expected
    versions["deepspeed"] = "0.18.0"
    assert extensions.cache_folder(root=tmp_path) != expected


def test_environments_with_equal_versions_do_not_undo_each_others_builds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = extensions.cache_folder(root=tmp_path)
    monkeypatch.setattr(sys, "prefix", "/home/u/other")
    assert extensions.cache_folder(root=tmp_path) != here


def test_lock_of_a_killed_build_is_removed(tmp_path: Path) -> None:
    lock = tmp_path / "cpu_adam" / "lock"
    lock.parent.mkdir()
    lock.touch()
    (lock.parent / "cpu_adam.so").touch()

    assert extensions.prepared(tmp_path) == tmp_path
    assert not lock.exists()
    assert (lock.parent / "cpu_adam.so").exists()


def test_lock_of_a_build_that_goes_on_is_left_alone(tmp_path: Path) -> None:
    for op in ("cpu_adam", "fused_adam"):
        (tmp_path / op).mkdir()
    dead, living = FileBaton(tmp_path / "cpu_adam" / "lock"), FileBaton(tmp_path / "fused_adam" / "lock")
    assert dead.try_acquire()
    assert living.try_acquire()
    os.close(dead.fd)  # what the kernel does for a killed process

    assert extensions.waited_for(tmp_path)
    assert not (tmp_path / "cpu_adam" / "lock").exists()
    assert (tmp_path / "fused_adam" / "lock").exists()
    living.release()
    assert not extensions.waited_for(tmp_path)


def test_cache_that_others_can_write_to_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shared objects are loaded from it."""
    monkeypatch.setattr(extensions.tempfile, "tempdir", str(tmp_path))
    usual = tmp_path / f"dsdoctor-{os.getuid()}"
    assert extensions.cache_folder().parents[1] == usual
    assert stat.S_IMODE(usual.stat().st_mode) == 0o700

    usual.chmod(0o777)
    assert usual not in extensions.cache_folder().parents

    usual.rmdir()
    usual.symlink_to(tmp_path)
    assert usual not in extensions.cache_folder().parents
