from __future__ import annotations

import mmap
import os
import subprocess
from pathlib import Path

from dsdoctor.runs.leftovers import SharedMemory, marked_pids


def test_processes_are_known_by_their_mark(tmp_path: Path) -> None:
    marked = subprocess.Popen(["sleep", "60"], env={**os.environ, "DSDOCTOR_RUN": str(tmp_path)})
    other = subprocess.Popen(["sleep", "60"], env={**os.environ, "DSDOCTOR_RUN": f"{tmp_path}-2"})
    try:
        assert marked_pids(tmp_path) == {marked.pid}
    finally:
        for process in (marked, other):
            process.kill()
            process.wait()


def segment(path: Path) -> mmap.mmap:
    path.write_bytes(b"x" * 4096)
    with open(path, "r+b") as file:
        return mmap.mmap(file.fileno(), 4096)


def test_new_segment_that_a_process_of_the_run_has_mapped_is_removed(tmp_path: Path) -> None:
    memory = SharedMemory(tmp_path)
    held = segment(tmp_path / "psm 1")

    memory.look([os.getpid()])
    held.close()

    assert memory.remove() == ("psm 1",)
    assert not (tmp_path / "psm 1").exists()


def test_segment_from_before_or_of_another_program_stays(tmp_path: Path) -> None:
    old = segment(tmp_path / "old")
    memory = SharedMemory(tmp_path)
    (tmp_path / "of-another").touch()

    memory.look([os.getpid()])
    old.close()

    assert memory.remove() == ()
    assert {path.name for path in tmp_path.iterdir()} == {"old", "of-another"}


def test_segment_that_was_removed_by_its_maker_is_no_matter(tmp_path: Path) -> None:
    memory = SharedMemory(tmp_path)
    held = segment(tmp_path / "psm_1")
    memory.look([os.getpid()])
    held.close()
    (tmp_path / "psm_1").unlink()
    assert memory.remove() == ()


def test_foreign_name_is_looked_for_a_few_times_and_once_more_at_the_end(tmp_path: Path) -> None:
    memory = SharedMemory(tmp_path)
    path = tmp_path / "late"
    path.write_bytes(b"x" * 4096)
    for _ in range(10):
        memory.look([os.getpid()])
    with open(path, "r+b"):
        memory.look([os.getpid()])
        assert memory.remove() == ()
        memory.look([os.getpid()], again=True)
    assert memory.remove() == ("late",)
