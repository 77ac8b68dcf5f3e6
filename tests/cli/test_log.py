"""`dsdoctor log` as a command: its document, its exit codes, its manners."""

import json
import subprocess
import sys

import pytest

from dsdoctor.cli.main import main

HEALTHY = "".join(f"step {i} loss {3 - i / 50:.3f}\n" for i in range(1, 30)) + "training finished\n"
BROKEN = HEALTHY.replace("training finished\n", "") + (
    "Traceback (most recent call last):\n  File \"/home/u/train.py\", line 7, in main\n    x\nKeyError: 'label'\n"
)


@pytest.fixture
def log(tmp_path):
    def write(text):
        path = tmp_path / "train.log"
        path.write_text(text)
        return str(path)

    return write


def test_healthy_is_0_and_says_how_much_was_read(log, capsys):
    assert main(["log", log(HEALTHY)]) == 0
    assert "30 lines" in capsys.readouterr().out


def test_an_error_is_1_with_its_line(log, capsys):
    path = log(BROKEN)
    assert main(["log", path, "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["exit_code"] == 1
    assert document["command"] == "log"
    assert "verdict" not in document
    first = document["findings"][0]
    assert first["id"] == "launch/user-exception"
    assert first["evidence"][0]["line"] == 33
    assert document["series"]["loss"][0] == [1, 2.98]


def test_the_loss_scale_of_the_document(log, capsys):
    line = "[2024-03-20 12:15:47,438] [INFO] [loss_scaler.py:1:u] [deepspeed] OVERFLOW! Rank 0 Skipping step. "
    falls = "".join(f"{line}Attempted loss scale: {2**p}, reducing to {2 ** (p - 1)}\n" for p in (16, 15, 14))
    assert main(["log", log(falls + HEALTHY), "--json"]) == 0
    scale = json.loads(capsys.readouterr().out)["loss_scale"]
    assert scale["attempts"] == [[0, 65536, 32768], [1, 32768, 16384], [2, 16384, 8192]]
    assert (scale["skipped"], scale["settled_at"], scale["recommended_initial_scale_power"]) == (3, 8192, 13)
    assert scale["recommended_precision"] is None


def test_what_is_not_there_is_2_in_one_line(capsys):
    assert main(["log", "/no/such/file.log"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.strip().count("\n") == 0


def test_escapes_of_a_log_never_reach_the_terminal(log, capsys):
    main(["log", log(BROKEN.replace("'label'", "'\x1b]0;owned\x07\x1b[2Jlabel'"))])
    assert "\x1b]" not in capsys.readouterr().out


def test_the_command_imports_no_torch(log):
    code = "import sys; from dsdoctor.cli.main import main; main(['log', sys.argv[1], '--json']); "
    code += "sys.exit('torch' in sys.modules or 'deepspeed' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, log(BROKEN)], stdout=subprocess.DEVNULL, timeout=60)
    assert done.returncode == 0


def test_standard_input(log):
    command = [sys.executable, "-m", "dsdoctor", "log", "-", "--json"]
    done = subprocess.run(command, input=BROKEN.encode(), capture_output=True, timeout=60)
    assert done.returncode == 1
    assert json.loads(done.stdout)["findings"][0]["evidence"][0]["source"] == "<stdin>"
