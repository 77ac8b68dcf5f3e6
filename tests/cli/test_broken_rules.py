"""A rule of ours that crashes is told in the same way by every command, and spoils nothing else."""

import json

import pytest

import dsdoctor.diagnoses
import dsdoctor.machine.collect
from dsdoctor.cli.main import main
from dsdoctor.diagnoses.base import Diagnosis
from dsdoctor.machine.facts import MachineFacts


class Crashes(Diagnosis):
    """A rule with a defect."""

    id = "internal/crashes"
    severity = "error"
    title = "never told"

    def examine(self, case):
        raise KeyError("no such fact")


@pytest.fixture(autouse=True)
def crashing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(dsdoctor.diagnoses, "ALL", (Crashes(),))
    monkeypatch.setattr(dsdoctor.machine.collect, "collect", lambda **how: MachineFacts())
    (tmp_path / "ds_config.json").write_text('{"train_batch_size": 8}')
    (tmp_path / "some.log").write_text("node1:4211:4299 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.1<0>\n")


@pytest.mark.parametrize("form", [[], ["--json"]])
@pytest.mark.parametrize(
    "arguments",
    [
        ["env"],
        ["log", "some.log"],
        ["comm", "--read", "some.log"],
        ["config", "ds_config.json"],
        ["memory", "ds_config.json", "--params", "1M"],
    ],
)
def test_told_on_stderr(capsys, arguments, form):
    assert main([*arguments, *form]) == 0
    told = capsys.readouterr()
    assert told.err.count("a rule of dsdoctor itself failed, please report it: internal/crashes: Traceback") == 1
    assert "KeyError: 'no such fact'" in told.err
    assert "Traceback" not in told.out
    if form:
        assert json.loads(told.out)["findings"] == []
