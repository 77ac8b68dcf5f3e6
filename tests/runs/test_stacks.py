"""Dumps as CPython 3.11 writes them, for living processes and for crashed ones."""

from __future__ import annotations

from pathlib import Path

from dsdoctor.runs import stacks

WORKER = """\
Thread 0x00007fc3b4efb6c0 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 327 in wait
  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap

"""
MAIN = """\
Current thread 0x00007fc3b6243b80 (most recent call first):
  File "{script}", line 2 in wait_for_peers
  File "{script}", line 4 in <module>
"""


def names(text: str) -> list[str]:
    return [frame.function for frame in stacks.parse(text)]


def test_main_thread_is_shown_outermost_first_with_its_source(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("def wait_for_peers():\n    barrier()\n\nwait_for_peers()\n")

    frames = stacks.parse(WORKER + MAIN.format(script=script))

    assert [(f.file, f.line, f.function, f.text) for f in frames] == [
        (str(script), 4, "<module>", "wait_for_peers()"),
        (str(script), 2, "wait_for_peers", "barrier()"),
    ]


def test_main_thread_is_the_last_even_where_another_one_took_the_signal() -> None:
    main = MAIN.replace("Current thread", "Thread")
    assert names(WORKER.replace("Thread", "Current thread") + main) == ["<module>", "wait_for_peers"]


def test_the_last_dump_counts() -> None:
    assert names(MAIN + WORKER + MAIN.replace("wait_for_peers", "load_batch")) == ["<module>", "load_batch"]


def test_thread_names_of_newer_pythons_are_understood() -> None:
    assert names(MAIN.replace("b80 (", "b80 [python] (")) == ["<module>", "wait_for_peers"]


def test_main_thread_behind_too_many_others_is_not_guessed() -> None:
    assert names(MAIN + WORKER * 100 + "...\n") == []


def test_crash_shows_the_thread_that_crashed() -> None:
    crash = "Fatal Python error: Segmentation fault\n\n" + MAIN + "\n" + WORKER + "\nExtension modules: numpy, torch\n"
    assert names(WORKER + MAIN.replace("wait_for_peers", "earlier") + crash) == ["<module>", "wait_for_peers"]


def test_frames_of_dsdoctor_are_left_out_but_not_those_of_its_plain_engine() -> None:
    runs = Path(stacks.__file__).parent
    ours = f'  File "{runs / "script.py"}", line 5 in run_file\n  File "<frozen runpy>", line 88 in _run_code\n'
    plain = f'  File "{runs / "plain" / "engine.py"}", line 5 in backward\n'
    head, *frames = MAIN.splitlines(keepends=True)
    assert names("".join([head, plain, *frames, ours])) == ["<module>", "wait_for_peers", "backward"]


def test_nothing_written_is_no_stack(tmp_path: Path) -> None:
    assert stacks.read_stack(tmp_path, 0) == ()
    assert stacks.parse("") == ()
