"""The check with real ranks over gloo: healthy, and with one fault each."""

import os
import socket
from pathlib import Path

import pytest

from dsdoctor.comm import reading
from dsdoctor.comm.check import RANK_MODULE, check
from dsdoctor.comm.facts import CommFacts
from dsdoctor.comm.order import dtypes
from dsdoctor.runs.launcher import LaunchPlan

ROOT = Path(__file__).parents[2]
BF16 = {"bf16": {"enabled": True}}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run the check with a fault; the limits are short, since the ranks are on one machine."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)

    def start(fault: str = "", config: dict = BF16, deadline: float = 6.0, timeout: float = 25.0) -> CommFacts:
        monkeypatch.setenv("COMM_FAULT", fault)
        module = "tests.comm.faulty_rank" if fault else RANK_MODULE
        plan = LaunchPlan(nproc=2, device="cpu")
        return check(plan, config=config, folder=tmp_path / "comm", deadline=deadline, timeout=timeout, module=module)

    return start


def alive(pid: int | None) -> bool:
    """Runs, sleeps or is stopped; what has ended and was not yet collected is not alive."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in ("Z", "X")


def test_healthy(run):
    facts = run(deadline=30.0, timeout=90.0)
    assert facts.passed, facts.problem
    assert (facts.backend, facts.device, facts.world_size) == ("gloo", "cpu", 2)
    done = {(step.name, step.dtype) for step in facts.ranks[1].steps if step.status == "passed"}
    assert {("all_reduce", "bf16"), ("all_reduce", "fp32"), ("barrier", "fp32"), ("broadcast", "bf16")} <= done
    assert {("all_gather_into_tensor", "bf16"), ("rendezvous", ""), ("allocation", "")} <= done
    assert reading.read(facts).kind == "passed"
    assert not any(alive(rank.pid) for rank in facts.ranks)


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        pytest.param("never_starts:1", "missing", marks=pytest.mark.full),
        pytest.param("leaves_at_once:1", "missing", marks=pytest.mark.full),
        ("stands_still_before_a_collective:1", "stalled"),
        ("dies_in_a_collective:0", "died"),
        ("is_stopped_in_a_collective:1", "stopped"),
        ("sends_wrong_values:1", "wrong-value"),
        pytest.param("cannot_allocate:1", "failed", marks=pytest.mark.full),
    ],
)
def test_the_faulty_rank_is_named(run, fault, kind):
    # torchrun waits 30 s for a stopped process to end; the limit of the check is what ends it
    facts = run(fault, timeout=15.0 if "stopped" in fault else 30.0)
    found = reading.read(facts)
    assert not facts.passed
    assert found.kind == kind, facts
    guilty = int(fault.partition(":")[2])
    if kind == "wrong-value":  # all ranks see the sum that one of them spoilt
        assert [rank.rank for rank in found.ranks] == [0, 1]
        assert "the contribution of rank 1" in found.step.text
        assert "1 of 65536 elements" in found.step.text
    else:
        assert [rank.rank for rank in found.ranks] == [guilty]
    if kind == "stalled":  # torch's flight recorder knows what the other one waits in
        assert [rank.calls for rank in facts.ranks] == [("all_reduce",), ()]
    assert not any(alive(rank.pid) for rank in facts.ranks)


def test_a_collective_that_the_backend_lacks_is_no_failure(run):
    facts = run("has_no_such_collective:all")
    assert facts.passed, facts.problem
    assert "not-offered" in {step.status for step in facts.ranks[0].steps}


def test_a_port_that_the_user_chose_and_that_is_taken(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        facts = check(LaunchPlan(nproc=2, master_port=port, device="cpu"), config={}, folder=tmp_path / "comm")
    assert f"port {port}" in facts.port_taken
    assert "in use" in facts.port_taken
    assert f"process {os.getpid()}" in facts.port_taken
    assert facts.ranks == ()
    assert not (tmp_path / "comm").exists()


def test_a_name_that_does_not_resolve(tmp_path):
    plan = LaunchPlan(nproc=2, master_addr="no-such-host.invalid", device="cpu")
    facts = check(plan, config={}, folder=tmp_path / "comm")
    assert facts.resolution.error
    assert facts.ranks == ()


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, ("fp32",)),
        (BF16, ("bf16", "fp32")),
        ({"fp16": {"enabled": True}}, ("fp16", "fp32")),
        ({"fp16": {"enabled": "auto"}}, ("fp32",)),
        ({"fp16": None}, ("fp32",)),
    ],
)
def test_precision_of_the_check(config, expected):
    assert dtypes(config) == expected
