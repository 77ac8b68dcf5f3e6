"""Where writes go, that reads follow them, and what is left alone."""

from __future__ import annotations

import io
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dsdoctor.runs.containment import Containment
from dsdoctor.runs.session import RankSession
from dsdoctor.runs.spec import RunSpec, trace_path
from dsdoctor.runs.trace import TraceWriter, read_trace


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The script's working directory; the system's temp folder is another one, beside it."""
    for name in ("work", "run", "temp", "elsewhere"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temp"))
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


@pytest.fixture
def session(work: Path) -> RankSession:
    run = work.parent / "run"
    spec = RunSpec(script="train.py", cwd=str(work), folder=str(run), config={})
    return RankSession(spec, TraceWriter(trace_path(run, 0)), 0, 0, 1)


@pytest.fixture
def containment(session: RankSession) -> Containment:
    return Containment(session)


def store() -> ModuleType:
    """A library that saves and loads text."""
    module: Any = ModuleType("store")
    module.save = lambda text, f: f.write(text) if hasattr(f, "write") else Path(f).write_text(text)
    module.load = lambda f: Path(f).read_text()
    return module  # type: ignore[no-any-return]


def test_paths_of_the_script_are_led_below_the_run(containment: Containment, work: Path) -> None:
    saved = work.parent / "run" / "saved"
    assert containment.target("ckpt/a.pt", "x") == str(saved / "ckpt" / "a.pt")
    assert containment.target(work / "b.pt", "x") == str(saved / "b.pt")
    outside = work.parent / "elsewhere" / "c.pt"
    assert containment.target(outside, "x") == str(saved / "outside" / str(outside).lstrip("/"))


@pytest.mark.parametrize("path", ["../temp/a.pt", "/dev/null", "s3://bucket/a.pt", "../run/saved/a.pt"])
def test_temporary_files_devices_and_the_run_itself_are_left_alone(containment: Containment, path: str) -> None:
    assert containment.target(path, "x") == path


def test_working_directory_inside_the_temp_folder_is_the_scripts_all_the_same(
    work: Path, monkeypatch: pytest.MonkeyPatch, session: RankSession
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(work.parent))
    assert Containment(session).target("a.pt", "x") != "a.pt"


def test_original_is_the_way_back(containment: Containment, work: Path) -> None:
    for path in (work / "out" / "x", work.parent / "elsewhere" / "y"):
        assert containment.original(containment.target(path, "x")) == str(path)
    assert containment.original("other") == "other"


def test_load_finds_what_this_run_saved_and_only_that(containment: Containment, work: Path) -> None:
    module = store()
    (work / "old.txt").write_text("old")
    containment.redirect(module, "save", "f", "save", makes_folders=False)
    containment.resolve(module, "load", "f")
    module.save("new", "new.txt")
    module.save("changed", "old.txt")
    assert module.load("new.txt") == "new"
    assert module.load("old.txt") == "changed"
    assert (work / "old.txt").read_text() == "old", "the user's file stays"
    assert sorted(os.listdir(work)) == ["old.txt"]


def test_streams_go_through(containment: Containment) -> None:
    module = store()
    containment.redirect(module, "save", "f", "save")
    stream = io.StringIO()
    module.save("text", f=stream)
    assert stream.getvalue() == "text"


def test_missing_folder_still_fails(containment: Containment) -> None:
    module = store()
    containment.redirect(module, "save", "f", "save", makes_folders=False)
    with pytest.raises(FileNotFoundError):
        module.save("text", "nowhere/a.txt")


def test_each_path_is_told_once(containment: Containment, session: RankSession, work: Path) -> None:
    module = store()
    containment.redirect(module, "save", "f", "store.save")
    for _ in range(3):
        module.save("text", "a.txt")
    (told,) = read_trace(session.spec.folder, 0).contained
    assert (told.what, told.original) == ("store.save", "a.txt")
    assert told.replacement == str(work.parent / "run" / "saved" / "a.txt")


def test_wrong_call_fails_as_it_would_have(containment: Containment) -> None:
    module = store()
    containment.redirect(module, "save", "f", "save")
    with pytest.raises(TypeError):
        module.save()


def test_undo_puts_the_functions_back(containment: Containment, session: RankSession) -> None:
    module = store()
    save, load = module.save, module.load
    containment.redirect(module, "save", "f", "save")
    containment.resolve(module, "load", "f")
    session.undo()
    assert (module.save, module.load) == (save, load)


class Engine:
    """Checkpoints in the manner of DeepSpeed: a folder with tags, and `latest` beside them."""

    def save_checkpoint(self, save_dir: str, tag: str = "step1") -> None:
        folder = Path(save_dir, tag)
        folder.mkdir(parents=True)
        (folder / "weights").write_text(save_dir)
        Path(save_dir, "latest").write_text(tag)

    def load_checkpoint(self, load_dir: str, tag: str | None = None) -> str:
        tag = tag or Path(load_dir, "latest").read_text()
        return Path(load_dir, tag, "weights").read_text()


def test_engine_checkpoints_are_loaded_from_where_they_are(
    work: Path, containment: Containment, session: RankSession
) -> None:
    engine = Engine()
    engine.save_checkpoint("ckpt", tag="old")
    containment.contain_engine(engine)
    assert engine.load_checkpoint("ckpt") == "ckpt", "nothing saved in this run yet"
    engine.save_checkpoint("ckpt")
    assert sorted(os.listdir(work / "ckpt")) == ["latest", "old"]
    assert engine.load_checkpoint("ckpt") == str(work.parent / "run" / "saved" / "ckpt")
    assert engine.load_checkpoint("ckpt", tag="old") == "ckpt", "a tag of the user's own"
    session.undo()


def test_monitors_of_the_config_write_below_the_run(containment: Containment, work: Path) -> None:
    config = {"csv_monitor": {"enabled": True, "output_path": "logs"}, "tensorboard": {"enabled": False}}
    containment.contain_config(config)
    assert config == {
        "csv_monitor": {"enabled": True, "output_path": str(work.parent / "run" / "saved" / "logs")},
        "tensorboard": {"enabled": False},
    }


def test_failure_of_ours_becomes_a_note(containment: Containment, session: RankSession) -> None:
    module = store()
    containment.redirect(module, "save", "f", "save")
    blocked = Path(session.spec.folder) / "saved"
    blocked.write_text("a file where the folder should be")
    module.save("text", "a.txt")
    assert Path("a.txt").read_text() == "text", "the script's own call goes through"
    assert any("could not contain save" in note for note in read_trace(session.spec.folder, 0).notes)
