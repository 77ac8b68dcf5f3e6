"""What logs say of networks, rendezvous and barriers, told apart."""

import pytest

from dsdoctor.case import Case
from dsdoctor.comm.facts import CommFacts, CommRank, CommStep
from dsdoctor.diagnoses import diagnose
from dsdoctor.runs.facts import Frame
from tests.diagnoses.examples import found
from tests.diagnoses.making import TORCH, USER, event, failure, healthy, log, process_exit

BARRIER = "[/pytorch/ProcessGroupGloo.cpp:2841] Rank 3 failed to pass monitoredBarrier in 300000 ms"
NCCL = "NCCL error in: NCCLUtils.hpp:268, unhandled system error, NCCL version 2.21.5\nLast error:\n{}"
RENDEZVOUS = "The connection to the C10d store has failed. See inner exception for details."
OF_TORCHRUN = "/env/lib/python3.11/site-packages/torch/distributed/elastic/rendezvous/c10d_rendezvous_backend.py"
CREATES = Frame(file=OF_TORCHRUN, line=163, function="_create_tcp_store", text="raise RendezvousConnectionError(")
CALLS = Frame(file=OF_TORCHRUN, line=119, function="_call_store", text="raise RendezvousConnectionError(")


def raised(message, *frames, kind="RuntimeError", rank=0):
    return failure(kind, message, *(frames or (USER, TORCH)), rank=rank)


def said(message, *events, kind="RuntimeError", frames=(), **facts):
    return log(*events, failures=(raised(message, *frames, kind=kind),), **facts)


OWN = raised("'x'", USER, kind="KeyError", rank=1)
REFUSED = said(NCCL.format("socketStartConnect: Connect to 10.0.0.12<43217> failed : No route to host"))
LOOPBACK = said("[pair.cc:799] connect [127.0.1.1]:37105: Connection refused")
NO_INTERFACE = said("[enforce fail at device.cc:84] ifa != nullptr. Unable to find address for: eth0")
MEMLOCK = said(NCCL.format("Call to ibv_create_qp failed with error Cannot allocate memory"))
COMPLETION = said(NCCL.format("NET/IB : Got completion from peer 10.0.3.7<58414> with error 12, opcode 1, len 0"))
PEER_ACCESS = said(NCCL.format("Cuda failure 217 'peer access is not supported between these two devices'"))
SAME_GPU = said(NCCL.format("Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000"))
AGENT = said(RENDEZVOUS, kind="torch.distributed.elastic.rendezvous.api.RendezvousConnectionError", frames=(CREATES,))
AGENT_LOST = log(
    failures=(raised(RENDEZVOUS, CALLS, kind="RendezvousConnectionError"), OWN), exits=(process_exit(1),), steps_seen=9
)

MEANT = {
    "unreachable": (REFUSED, "comm/unreachable"),
    "client": (
        log(event("client-timeout", name="10.0.0.4", port="29500"), exits=(process_exit(1),)),
        "comm/unreachable",
    ),
    "agent": (AGENT, "comm/unreachable"),
    "loopback": (LOOPBACK, "comm/name-resolution"),
    "interface": (NO_INTERFACE, "comm/wrong-interface"),
    "memlock": (MEMLOCK, "comm/ib-error"),
    "completion": (COMPLETION, "comm/ib-error"),
    "peer-access": (PEER_ACCESS, "comm/p2p-hang"),
    "same-gpu": (SAME_GPU, "launch/local-rank-mismatch"),
    "monitored-before": (said(BARRIER), "comm/missing-rank"),
    "monitored-later": (said(BARRIER, steps_seen=30), "comm/stalled-rank"),
    "port": (log(event("port-taken"), exits=(process_exit(1),)), "launch/port-in-use"),
    "own-exception": (AGENT_LOST, "launch/user-exception"),
    "own-before-the-barrier": (log(failures=(OWN, raised(BARRIER)), steps_seen=30), "launch/user-exception"),
}
ONLY_NCCL = said(
    "NCCL error in: ProcessGroupNCCL.cpp:1691, unhandled system error (run with NCCL_DEBUG=INFO for details)"
)
POSITIVE = {"comm/nccl-error": [ONLY_NCCL, said(NCCL.format("Call to socket failed"))]}
NEGATIVE = {
    "comm/nccl-error": [
        REFUSED,
        MEMLOCK,
        PEER_ACCESS,
        SAME_GPU,
        said(NCCL.format("ncclRemoteError: remote process exited")),
        log(failures=(OWN, raised(NCCL.format("Call to socket failed")))),
        healthy(),
    ]
}
ALL = {identifier for _, identifier in MEANT.values()} | {"comm/timeout", "comm/failed-step"}


@pytest.mark.parametrize("name", MEANT)
def test_one_of_them_and_no_other(name):
    case, identifier = MEANT[name]
    assert len(found(case, identifier)) == 1
    assert [other for other in ALL - {identifier} if found(case, other)] == []


@pytest.mark.parametrize("case", POSITIVE["comm/nccl-error"])
def test_an_error_of_nccl_without_a_reason(case):
    assert len(found(case, "comm/nccl-error")) == 1
    assert not found(case, "launch/user-exception")


@pytest.mark.parametrize("case", NEGATIVE["comm/nccl-error"])
def test_an_error_of_nccl_with_a_reason(case):
    assert not found(case, "comm/nccl-error")


@pytest.mark.parametrize("identifier", sorted(ALL - {"comm/failed-step"}))
def test_none_of_them_in_a_run_that_is_well(identifier):
    assert not found(healthy(), identifier)
    assert not found(log(steps_seen=50), identifier)


def test_a_call_of_the_verbs_library_that_failed_and_did_no_harm():
    assert not found(log(event("ib-verbs", call="ibv_open_device"), steps_seen=50), "comm/ib-error")
    assert not found(log(event("no-peer-access"), steps_seen=50), "comm/p2p-hang")


def test_the_rank_that_called_fewer_collectives_is_behind():
    counts = [event("work-count", rank=r, enqueued=n, completed="807") for r, n in ((0, "811"), (1, "811"), (2, "807"))]
    late = event("watchdog", rank=0, seq="808", op="ALLREDUCE", numel="9", timeout="600000")
    (finding,) = found(log(late, *counts, steps_seen=50), "comm/timeout")
    assert "rank 2 is behind: it had called 807 collectives, rank 0 811" in finding.cause


def test_a_port_that_two_launchers_of_one_job_want():
    twice = event("node-rank", nodes="1", node="0", count=2)
    (finding,) = found(log(event("port-taken"), twice, exits=(process_exit(1),)), "launch/port-in-use")
    assert "launched more than once" in finding.cause
    assert "--ntasks-per-node=1" in finding.fixes[0].text


NOT_ALLOWED = (
    "The server socket has failed to listen on any local network address. The server socket has failed to bind to "
    "0.0.0.0:80 (errno: 13 - Permission denied).",
    "The server socket has failed to bind. port: 80, useIpv6: 0, code: -13, name: EACCES, message: permission denied",
)


@pytest.mark.parametrize("message", NOT_ALLOWED)
def test_a_port_that_only_root_may_listen_on(message):
    """Ports below 1024 (ip_unprivileged_port_start): nobody has to be looked for who holds it."""
    (finding,) = found(said(message, kind="DistNetworkError"), "launch/port-in-use")
    assert "permission" in finding.cause
    assert "in use" not in finding.cause
    assert [fix for fix in finding.fixes if "above 1023" in fix.text] == list(finding.fixes)


def test_the_moment_is_that_of_the_message_less_the_time_limit():
    text = "[E511 10:40:00.408271257 ProcessGroupNCCL.cpp:616] [Rank 0] Watchdog caught collective operation timeout"
    late = event("watchdog", text, rank=0, seq="1580", op="ALLREDUCE", numel="466119168", timeout="600000")
    (finding,) = found(log(late, steps_seen=50), "comm/timeout")
    assert "began to wait at 10:30:00" in finding.cause


def checked(text):
    """A communication check whose rank 1 fails with that exception."""
    arrived = CommStep(name="rendezvous", status="passed")
    ended = (arrived, CommStep(name="process-group", status="failed", text=text))
    ranks = (
        CommRank(rank=0, steps=(arrived, CommStep(name="process-group", status="unfinished")), ending="terminated"),
        CommRank(rank=1, exit_code=1, steps=ended),
    )
    return Case(comm=CommFacts(world_size=2, backend="nccl", ranks=ranks))


@pytest.mark.parametrize(
    ("text", "identifier"),
    [
        ("RuntimeError: [enforce fail at device.cc:84] Unable to find address for: eth7", "comm/wrong-interface"),
        (f"DistBackendError: {NCCL.format('Call to ibv_create_qp failed with error -1')}", "comm/ib-error"),
        (
            f"DistBackendError: {NCCL.format('peer access is not supported between these two devices')}",
            "comm/p2p-hang",
        ),
        (f"DistBackendError: {NCCL.format('Call to socket failed')}", "comm/nccl-error"),
        ("RuntimeError: nobody has seen this before", "comm/failed-step"),
    ],
)
def test_the_check_is_told_the_same_as_the_job(text, identifier):
    findings = [one for one in diagnose(checked(text), strict=True).findings if one.severity == "error"]
    assert [one.id for one in findings] == [identifier]
    assert findings[0].evidence[0].rank == 1
