"""However a command ends: one line on stderr, one document on stdout with --json, the exit code of the contract."""

import json
import os
import subprocess
import sys

import pytest

from dsdoctor.case import Case
from dsdoctor.cli import explain
from dsdoctor.cli.main import main
from dsdoctor.finding import Verdict
from dsdoctor.triage import Triage

COMMAND = [sys.executable, "-m", "dsdoctor"]


def call(*arguments, **options):
    return subprocess.run([*COMMAND, *arguments], capture_output=True, timeout=60, check=False, **options)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "ds.json").write_text('{"train_batch_size": 8}')
    (tmp_path / "folder").mkdir()
    (tmp_path / "list.json").write_text("[1, 2]")
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["config", "missing.json"], "no such ds_config: missing.json"),
        (["config", "ds.json", "--script", "folder"], "not a file: folder"),
        (["config", "ds.json", "--script", "missing.py"], "no such file: missing.py"),
        (["comm", "list.json"], "list.json: line 1, column 1: a ds_config is an object, this file holds a list"),
        (["triage", "ds.json", "missing.py"], "no such file: missing.py"),
        (["explain", "nope"], "no such diagnosis: nope"),
        (["log", "missing.log"], "missing.log: no such file or folder"),
    ],
)
def test_what_cannot_be_done_is_a_document_too(folder, arguments, words):
    finished = call(*arguments, "--json", cwd=folder)
    assert finished.returncode == 2
    document = json.loads(finished.stdout)
    assert (document["command"], document["exit_code"], document["findings"]) == (arguments[0], 2, [])
    assert words in document["error"]
    assert finished.stderr.decode().splitlines() == [f"dsdoctor: {document['error']}"]


@pytest.mark.parametrize(
    ("arguments", "command", "words"),
    [
        (["nonsense"], "", "invalid choice: 'nonsense'"),
        ([], "", "required: COMMAND"),
        (["triage", "ds.json"], "triage", "required: TRAIN.py"),
        (["triage", "ds.json", "train.py", "--nproc", "none"], "triage", "--nproc"),
        (["blame", "--out"], "blame", "--out: expected one argument"),
        (["comm", "--nproc", "many"], "comm", "--nproc"),
        (["log", "a.log", "--no-such"], "log", "unrecognized arguments: --no-such"),
    ],
)
def test_a_mistake_in_the_arguments_is_a_document_too(folder, arguments, command, words):
    finished = call(*arguments, "--json", cwd=folder)
    assert finished.returncode == 2
    document = json.loads(finished.stdout)
    assert (document["command"], document["exit_code"], document["findings"]) == (command, 2, [])
    assert words in document["error"]
    printed = finished.stderr.decode()
    assert printed.startswith("usage: dsdoctor")
    assert words in printed


def test_json_after_the_arguments_of_the_script_is_the_scripts(folder):
    finished = call("triage", "ds.json", "--", "--json", cwd=folder)
    assert (finished.returncode, finished.stdout) == (2, b"")


def raises(error):
    def run(arguments):
        raise error

    return run


def test_a_fault_of_dsdoctor_is_one_line_with_its_place_and_no_verdict(monkeypatch, capsys):
    monkeypatch.setattr(explain, "run", raises(KeyError("x")))
    assert main(["explain"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("dsdoctor: a fault of dsdoctor itself, please report it: KeyError: 'x' (")
    assert captured.err.count("\n") == 1


def test_a_full_disk_is_no_fault_of_dsdoctor(monkeypatch, capsys):
    monkeypatch.setattr(explain, "run", raises(OSError(28, "No space left on device", "/out/x")))
    assert main(["explain"]) == 2
    assert capsys.readouterr().err == "dsdoctor: /out/x: No space left on device\n"


def test_a_report_that_cannot_be_kept_is_printed_all_the_same(folder, monkeypatch, capsys):
    def deletes_the_report(job, **_):
        job.folder.rmdir()
        verdict = Verdict(blame="healthy", summary="s", confidence=0.9)
        return Triage(job=job, case=Case(), stages=(), findings=(), verdict=verdict)

    monkeypatch.chdir(folder)
    monkeypatch.setattr("dsdoctor.triage.triage", deletes_the_report)
    (folder / "train.py").write_text("")
    assert main(["triage", "ds.json", "train.py", "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["verdict"]["blame"] == "healthy"
    assert "the report is not kept in" in captured.err


def test_ctrl_c_is_3_and_a_document(monkeypatch, capsys):
    monkeypatch.setattr(explain, "run", raises(KeyboardInterrupt()))
    assert main(["explain", "--json"]) == 3
    assert json.loads(capsys.readouterr().out)["error"] == "stopped"


def test_an_encoding_without_the_characters_of_a_page_ends_nothing():
    finished = call("explain", env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert finished.returncode == 0


def test_a_document_is_utf_8_whatever_the_terminal_speaks(folder):
    (folder / "ds.json").write_text('{"größe": 8}', encoding="utf-8")
    finished = call("config", "ds.json", "--json", cwd=folder, env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert "größe" in str(json.loads(finished.stdout.decode("utf-8"))["findings"])


@pytest.mark.parametrize(
    ("redirection", "code"),
    [(">&-", 0), ("2>&-", 0), ("<&- >&- 2>&-", 0), ("| head -c 1", 2), ("2>&1 | head -c 1", 2), ("> /dev/full", 2)],
)
def test_streams_that_nobody_reads(redirection, code):
    line = f"set -o pipefail; {sys.executable} -m dsdoctor explain --json {redirection}"
    finished = subprocess.run(["bash", "-c", line], capture_output=True, timeout=60, check=False)
    assert finished.returncode == code
    assert b"Traceback" not in finished.stderr
    assert b"Exception ignored" not in finished.stderr
