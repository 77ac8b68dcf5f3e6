"""What is tried after a failure over NCCL. The check itself is played here: no machine without a GPU can fail so."""

import os

import pytest

from dsdoctor.case import Case
from dsdoctor.comm.experiments import EXPERIMENTS, with_experiments
from dsdoctor.comm.facts import CommFacts, CommRank, CommStep
from dsdoctor.comm.nccl_log import NcclOutput, read_summary
from dsdoctor.diagnoses import diagnose
from dsdoctor.runs.launcher import LaunchPlan
from dsdoctor.runs.processes import LAUNCHER_OUTPUT

GOOD = (CommStep(name="goodbye", status="passed"),)
ARRIVED = (CommStep(name="rendezvous", status="passed"), CommStep(name="process-group", status="passed"))
STUCK = (*ARRIVED, CommStep(name="all_reduce", status="timeout"))
NO_GPU = (ARRIVED[0], CommStep(name="device", status="failed", text="RuntimeError: No CUDA GPUs are available"))
AGAIN, NO_P2P, NO_IB, LOOPBACK, NOTHING = EXPERIMENTS
LOGGED = "node0:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM\n"
PRINTED = "NCCL DIAG [INFO] p2p: only 1/2 GPU-to-GPU peer accesses passed verification\n"


class Machine:
    """Passes where one of its cures is set, or on the CPU; writes down what it was asked, and logs as NCCL does."""

    def __init__(self, *cures: str, fails: tuple[CommStep, ...] = STUCK) -> None:
        self.cures = cures
        self.fails = fails
        self.asked: list[dict[str, str]] = []

    def check(self, plan, *, config, folder, deadline, timeout) -> CommFacts:
        names = {name for variables in EXPERIMENTS.values() for name in variables} | {"NCCL_DEBUG"}
        env = {name: os.environ[name] for name in names if name in os.environ}
        self.asked.append({**env, "device": plan.device})
        if "NCCL_DEBUG_FILE" in os.environ:
            with open(os.environ["NCCL_DEBUG_FILE"].replace("%h", "node0").replace("%p", "1"), "a") as log:
                log.write(LOGGED)
        folder.mkdir()
        if "NCCL_RUN_DIAGNOSTICS" in env:
            (folder / LAUNCHER_OUTPUT).write_text(PRINTED)
        well = plan.device == "cpu" or any(cure in env for cure in self.cures)
        steps, ending = (GOOD, "finished") if well else (self.fails, "gave-up")
        ranks = tuple(CommRank(rank=rank, steps=steps, ending=ending) for rank in range(2))
        return CommFacts(world_size=2, backend="gloo" if plan.device == "cpu" else "nccl", ranks=ranks)


def run(machine, folder, device="auto", tell=lambda text: None):
    plan = LaunchPlan(nproc=2, device=device)
    return with_experiments(plan, config={}, folder=folder, deadline=1.0, check=machine.check, tell=tell)


def test_nothing_is_tried_after_success(tmp_path):
    machine = Machine("NCCL_P2P_DISABLE")
    facts, said = run(machine, tmp_path, device="cpu")
    assert facts.passed
    assert len(machine.asked) == 1
    assert said == NcclOutput()


def test_nothing_is_tried_where_nccl_was_not_reached(tmp_path):
    machine = Machine("NCCL_P2P_DISABLE", fails=NO_GPU)
    facts, said = run(machine, tmp_path)
    assert not facts.passed
    assert (len(machine.asked), facts.experiments, said) == (1, (), NcclOutput())


@pytest.mark.parametrize(
    ("cures", "tried", "identity", "words"),
    [
        (("NCCL_P2P_DISABLE",), [AGAIN, NO_P2P, "gloo"], "comm/p2p-hang", "passes with NCCL_P2P_DISABLE=1"),
        (("NCCL_IB_DISABLE",), [AGAIN, NO_P2P, NO_IB, "gloo"], "comm/ib-error", "passes with NCCL_IB_DISABLE=1"),
        (
            ("NCCL_SOCKET_IFNAME",),
            [AGAIN, NO_P2P, NO_IB, LOOPBACK, "gloo"],
            "comm/wrong-interface",
            "passes with NCCL_SOCKET_IFNAME=lo",
        ),
    ],
)
def test_what_cures_it_is_named(tmp_path, cures, tried, identity, words):
    machine = Machine(*cures)
    facts, _ = run(machine, tmp_path)
    assert not facts.passed
    assert [one.name for one in facts.experiments] == tried
    assert facts.experiments[-2].passed
    first = diagnose(Case(comm=facts), strict=True).findings[0]
    assert first.id == identity
    assert words in first.cause
    assert machine.asked[0] == {"device": "auto", "NCCL_DEBUG": "INFO"}  # else as the user has it
    assert not set(os.environ) & {"NCCL_P2P_DISABLE", "NCCL_IB_DISABLE", "NCCL_DEBUG_FILE", "NCCL_RUN_DIAGNOSTICS"}


def test_what_nothing_cures_accuses_nobody(tmp_path):
    facts, _ = run(Machine(), tmp_path)
    assert [one.name for one in facts.experiments] == [*EXPERIMENTS, "gloo"]
    assert [one.passed for one in facts.experiments] == [False] * len(EXPERIMENTS) + [True]
    ids = {finding.id for finding in diagnose(Case(comm=facts), strict=True).findings}
    assert not ids & {"comm/p2p-hang", "comm/ib-error", "comm/wrong-interface"}


def test_what_passes_when_it_is_repeated_accuses_nobody(tmp_path):
    facts, _ = run(Machine("NCCL_RUN_DIAGNOSTICS"), tmp_path)
    assert [one.name for one in facts.experiments] == [AGAIN, "gloo"]
    ids = {finding.id for finding in diagnose(Case(comm=facts), strict=True).findings}
    assert not ids & {"comm/p2p-hang", "comm/ib-error", "comm/wrong-interface"}


def test_what_nccl_said_of_the_failing_run_and_of_its_own_diagnostics(tmp_path):
    told = []
    _, said = run(Machine("NCCL_P2P_DISABLE"), tmp_path, tell=told.append)
    summary = read_summary([said.logs, said.printed])
    assert summary.to_dict()["channels"] == {"P2P/CUMEM": {"0-1": 1}}  # of the check as it was given alone
    assert list(summary.diagnostics) == ["[INFO] p2p: only 1/2 GPU-to-GPU peer accesses passed verification"]
    assert [text.rpartition("trying: ")[2] for text in told] == [AGAIN, NO_P2P, "gloo instead of NCCL"]


def test_what_the_user_set_is_kept_and_there_again(tmp_path, monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth0")
    machine = Machine()
    run(machine, tmp_path)
    assert {asked["NCCL_DEBUG"] for asked in machine.asked} == {"WARN"}
    assert "NCCL_DEBUG_FILE" not in os.environ
    assert machine.asked[0]["NCCL_SOCKET_IFNAME"] == "eth0"
    assert (os.environ["NCCL_DEBUG"], os.environ["NCCL_SOCKET_IFNAME"]) == ("WARN", "eth0")
