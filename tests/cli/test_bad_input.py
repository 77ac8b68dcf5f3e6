"""A user's mistake ends in one clear line and exit code 2, before any process is started."""

import os
import subprocess
import sys

import pytest


def call(cwd, *arguments):
    command = [sys.executable, "-m", "dsdoctor", *arguments]
    finished = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=60, check=False)
    assert "Traceback" not in finished.stderr
    return finished


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "ds_config.json").write_text('{"train_batch_size": 8}')
    (tmp_path / "train.py").write_text("print('never run')")
    (tmp_path / "broken.py").write_text("def f(:\n")
    (tmp_path / "data.bin").write_bytes(b"\x00\x01\xff")
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["triage", "missing.json", "train.py"], "no such file: missing.json"),
        (["triage", "ds_config.json", "missing.py"], "no such file: missing.py"),
        (["triage", ".", "train.py"], "not a file: ."),
        (["triage", "ds_config.json", "broken.py"], "not a Python script: broken.py:1"),
        (["triage", "ds_config.json", "data.bin"], "not a Python script: data.bin"),
        (["triage", "ds_config.json", "train.py", "--nproc", "0"], "0 is not above 0"),
        (["triage", "ds_config.json", "train.py", "--steps", "-1"], "-1 is not above 0"),
        (["triage", "ds_config.json", "train.py", "--timeout", "inf"], "inf is no number of seconds above 0"),
        (["triage", "ds_config.json", "train.py", "--stages", "comm,spell"], "no such stage: spell"),
        (["triage", "ds_config.json", "train.py", "--out", "train.py"], "cannot write reports to train.py"),
        (["triage", "ds_config.json", "train.py", "--launcher", "slurm"], "needs srun, which is not on the PATH"),
        (["triage", "ds_config.json", "train.py", "--hostfile", "data.bin"], "add --launcher deepspeed"),
        (["nan", "ds_config.json", "train.py", "--launcher", "deepspeed", "--hostfile", "no"], "no such file: no"),
        (["nan", "ds_config.json", "train.py", "--launcher", "deepspeed", "--hostfile", "train.py"], "HOST slots=N"),
        (["nan", "replay", "."], "no such file: bundle.json"),
        (["nan", "ds_config.json", "train.py", "--trace-batches", "1,x"], "x is no number of a batch"),
        (["nan", "ds_config.json", "train.py", "--stop-after-batch", "-3"], "-3 is no number of a batch"),
        (["nan", "ds_config.json", "train.py", "--batches", "1,2"], "--batches belongs to nan compare"),
        (["nan", "compare", "."], "takes two runs, or one and --batches"),
        (["nan", "compare", ".", "missing"], "no numbers of a run in ."),
        (["nan", "selftest", "ds_config.json"], "a config and a script are needed"),
        (["nan", "ds_config.json", "train.py", "other.py"], "a config and a script are needed"),
        (["triage", "ds_config.json"], "TRAIN.py"),
        (["config", "missing.json"], "missing.json"),
        (["explain", "loss-scale/colapse"], "did you mean loss-scale/collapse?"),
        (["nonsense"], "invalid choice"),
    ],
)
def test_one_line_and_exit_code_2(folder, arguments, words):
    finished = call(folder, *arguments)
    assert finished.returncode == 2
    assert words in finished.stderr
    assert finished.stdout == ""
    assert (folder / "train.py").read_text() == "print('never run')"


@pytest.mark.skipif(os.geteuid() == 0, reason="root can read everything")
def test_a_file_that_cannot_be_read(folder):
    (folder / "ds_config.json").chmod(0)
    assert "cannot be read" in call(folder, "triage", "ds_config.json", "train.py").stderr


def test_a_script_is_compiled_but_never_run_before_its_stage(folder):
    finished = call(folder, "triage", "ds_config.json", "broken.py")
    assert "never run" not in finished.stdout + finished.stderr
