"""What is tried after a failure over NCCL. The check itself is played here: no machine without a GPU can fail so."""

import os

import pytest

from dsdoctor.case import Case
from dsdoctor.comm.experiments import with_experiments
from dsdoctor.comm.facts import CommFacts, CommRank, CommStep
from dsdoctor.diagnoses import diagnose
from dsdoctor.runs.launcher import LaunchPlan

GOOD = (CommStep(name="goodbye", status="passed"),)
STUCK = (CommStep(name="rendezvous", status="passed"), CommStep(name="all_reduce", status="timeout"))


class Machine:
    """Passes where one of its cures is set, or on the CPU; writes down what it was asked."""

    def __init__(self, *cures: str) -> None:
        self.cures = cures
        self.asked: list[dict[str, str]] = []

    def check(self, plan, *, config, folder, deadline, timeout) -> CommFacts:
        names = ("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE", "NCCL_SHM_DISABLE", "NCCL_DEBUG")
        env = {name: os.environ[name] for name in names if name in os.environ}
        self.asked.append({**env, "device": plan.device})
        well = plan.device == "cpu" or any(cure in env for cure in self.cures)
        steps, ending = (GOOD, "finished") if well else (STUCK, "gave-up")
        ranks = tuple(CommRank(rank=rank, steps=steps, ending=ending) for rank in range(2))
        return CommFacts(world_size=2, backend="gloo" if plan.device == "cpu" else "nccl", ranks=ranks)


def run(machine, tmp_path):
    return with_experiments(LaunchPlan(nproc=2), config={}, folder=tmp_path, deadline=1.0, check=machine.check)[0]


def test_nothing_is_tried_after_success(tmp_path):
    machine = Machine("NCCL_P2P_DISABLE")
    facts = with_experiments(
        LaunchPlan(nproc=2, device="cpu"), config={}, folder=tmp_path, deadline=1.0, check=machine.check
    )[0]
    assert facts.passed
    assert len(machine.asked) == 1


@pytest.mark.parametrize(
    ("cures", "tried", "identity"),
    [
        (("NCCL_P2P_DISABLE",), ["NCCL without P2P", "gloo"], "comm/p2p-hang"),
        (("NCCL_IB_DISABLE",), ["NCCL without P2P", "NCCL without InfiniBand", "gloo"], "comm/ib-error"),
    ],
)
def test_what_cures_it_is_named(tmp_path, cures, tried, identity):
    machine = Machine(*cures)
    facts = run(machine, tmp_path)
    assert not facts.passed
    assert [one.name for one in facts.experiments] == tried
    assert facts.experiments[-2].passed
    assert diagnose(Case(comm=facts), strict=True).findings[0].id == identity
    assert machine.asked[0] == {"device": "auto"}  # as the user has it
    assert all(asked["NCCL_DEBUG"] == "INFO" for asked in machine.asked[1:-1])
    assert not set(os.environ) & {"NCCL_P2P_DISABLE", "NCCL_IB_DISABLE", "NCCL_DEBUG_FILE"}


def test_what_nothing_cures_accuses_nobody(tmp_path):
    facts = run(Machine(), tmp_path)
    assert [one.passed for one in facts.experiments] == [False, False, False, True]
    ids = {finding.id for finding in diagnose(Case(comm=facts), strict=True).findings}
    assert not ids & {"comm/p2p-hang", "comm/ib-error"}


def test_what_the_user_set_is_there_again(tmp_path, monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    run(Machine(), tmp_path)
    assert os.environ["NCCL_DEBUG"] == "WARN"
