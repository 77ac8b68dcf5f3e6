"""Two nodes of two ranks each, with one fault: which is named, by which rank or host, and that nothing remains.

Every test starts real processes in network namespaces. The commonest few run always, the whole with `-m full`.
"""

import socket
import subprocess
import time

import pytest

from tests.comm import nodes

pytestmark = pytest.mark.skipif(bool(nodes.missing()), reason=nodes.missing() or "complete")
full = pytest.mark.full
DEADLINE = 5.0
PATIENT = 20.0
"""Where no deadline is to pass: one that a busy machine does not miss."""
START = 25.0
"""Seconds that importing torch in all processes at once may take on a busy machine with two cores."""


@pytest.fixture
def pair(tmp_path):
    with nodes.network(2, tmp_path) as both:
        yield both


def check(both, arguments=(), *, deadline=DEADLINE, **how):
    """Start the ranks, wait for all; what rank 0 says, and all processes."""
    ranks = nodes.start_ranks(both, ["--deadline", str(deadline), *arguments], **how)
    seconds = deadline + START + 5
    codes = nodes.wait(ranks, seconds)
    assert None not in codes.values(), f"still running after {seconds} s: {codes}"
    assert not any(nodes.pids_in(node.namespace) for node in both)
    return codes, ranks


def errors(process) -> list[dict]:
    document = process.document
    assert document is not None, process.errors
    return [finding for finding in document["findings"] if finding["severity"] == "error"]


def told(finding) -> str:
    return finding["cause"] + " ".join(f"{e['rank']} {e['text']}" for e in finding["evidence"])


def expect(codes, ranks, identity, *words, speaker=0) -> dict:
    """All end with 1, one process speaks for everyone, and says this first."""
    assert set(codes.values()) == {1}, codes
    assert [rank for rank, one in ranks.items() if one.document] == [speaker]
    found = errors(ranks[speaker])
    assert found, ranks[speaker].document
    assert found[0]["id"] == identity, found
    for word in words:
        assert word in told(found[0]), found[0]
    return found[0]


def fault(kind: str, rank: int) -> dict:
    return {"module": "tests.comm.faulty_member", "environment": {rank: {"COMM_FAULT": f"{kind}:{rank}"}}}


def test_healthy(pair, tmp_path):
    config = tmp_path / "ds_config.json"
    config.write_text('{"bf16": {"enabled": true}, "zero_optimization": {"stage": 2, "reduce_bucket_size": 5e5}}')
    codes, ranks = check(pair, [str(config)], deadline=PATIENT)
    assert set(codes.values()) == {0}, (codes, ranks[0].document, ranks[0].errors)
    assert [rank for rank, one in ranks.items() if one.document] == [0]
    document = ranks[0].document
    assert not errors(ranks[0])
    assert {member["host"] for member in document["comm"]["members"]} == {"node0", "node1"}
    steps = {(s["name"], s["dtype"], s["elements"]) for s in document["comm"]["ranks"][3]["steps"]}
    assert {("all_reduce", "bf16", 500_000), ("ring", "fp32", 0), ("several_groups", "bf16", 0)} <= steps
    pairs = {(one["low"], one["high"]): one["across"] for one in document["comm"]["speeds"]["pairs"]}
    assert pairs == {(0, 1): False, (0, 2): True, (0, 3): True, (1, 2): True, (1, 3): True, (2, 3): False}
    assert all(abs(member["clock"]) < 1.0 for member in document["comm"]["members"])


def test_a_firewall_in_one_direction(pair):
    pair[1].run("iptables", "-A", "INPUT", "-p", "tcp", "--syn", "-j", "DROP")
    found = expect(
        *check(pair, deadline=PATIENT),
        "comm/unreachable",
        "node0 (rank 0) cannot connect to node1 (rank 2)",
        "10.77.0.2",
    )
    assert "the other way works" in found["cause"]


@full
def test_the_masters_port_is_blocked(pair):
    pair[0].run("iptables", "-A", "INPUT", "-p", "tcp", "--dport", str(nodes.PORT), "!", "-i", "lo", "-j", "DROP")
    codes, ranks = check(pair)
    assert set(codes.values()) == {1}
    assert [rank for rank, one in ranks.items() if one.document] == [0, 2]  # each node says what it knows
    (far,) = errors(ranks[2])
    assert far["id"] == "comm/unreachable"
    assert "node1 (rank 2) cannot reach rank 0" in far["cause"]
    (near,) = errors(ranks[0])
    assert near["id"] == "comm/missing-rank"
    assert "ranks 2, 3" in near["cause"]


@full
def test_a_peer_goes_down_in_the_middle(pair):
    """Node 1 vanishes while its rank 2 keeps the others waiting in a collective."""
    ranks = nodes.start_ranks(pair, ["--deadline", str(DEADLINE)], **fault("stands_still_before_a_collective", 2))
    records = wait_for_records(pair)
    nodes.end_all_in(pair[1].namespace)
    begun = time.monotonic()
    codes = nodes.wait(ranks, DEADLINE + 10)
    assert time.monotonic() - begun < DEADLINE + 5, records
    assert (codes[0], codes[1]) == (1, 1)
    found = errors(ranks[0])[0]
    assert found["id"] == "comm/unreachable"
    assert "ranks 2, 3 on node1" in found["cause"]


def wait_for_records(pair, seconds: float = 60.0) -> str:
    """Until all four ranks have begun the first collective, by what stands in their folders."""
    from pathlib import Path

    end = time.monotonic() + seconds
    text: dict[str, str] = {}
    mine = {pid for node in pair for pid in nodes.pids_in(node.namespace)}
    while time.monotonic() < end:
        mine |= {pid for node in pair for pid in nodes.pids_in(node.namespace)}
        text = {
            str(path): path.read_text()
            for path in Path("/tmp").glob("dsdoctor-comm-*/comm-rank*.jsonl")
            if f'"pid": {_pid(path)}' and _pid(path) in mine
        }
        if sum('"begin", ' in one and "all_reduce" in one for one in text.values()) == 4:
            return ""
        time.sleep(0.1)
    raise AssertionError(f"the ranks did not come to the first collective: {text}")


def _pid(path) -> int:
    import json

    lines = path.read_text().splitlines()
    return json.loads(lines[0])["pid"] if lines else 0


@full
def test_the_wrong_interface(pair):
    pair[1].run("ip", "link", "add", "docker0", "type", "bridge")
    pair[1].run("ip", "addr", "add", "172.17.0.1/16", "dev", "docker0")
    pair[1].run("ip", "link", "set", "docker0", "up")
    wrong = {rank: {"GLOO_SOCKET_IFNAME": "docker0"} for rank in (2, 3)}
    found = expect(*check(pair, environment=wrong, deadline=PATIENT), "comm/wrong-interface", "node1", "docker0")
    assert "GLOO_SOCKET_IFNAME to eth0 on node1" in found["fixes"][0]["text"]


@full
def test_an_interface_that_does_not_exist(pair):
    wrong = {rank: {"GLOO_SOCKET_IFNAME": "eth9"} for rank in (2, 3)}
    expect(*check(pair, environment=wrong, deadline=PATIENT), "comm/wrong-interface", "node1", "eth9")


@full
def test_a_node_that_takes_its_own_name_for_the_loopback(pair):
    pair[1].hosts = [f"{pair[0].address} node0", "127.0.1.1 node1"]
    expect(*check(pair, deadline=PATIENT), "comm/name-resolution", "node1", "127.0.1.1")


@full
def test_a_masters_name_that_is_the_loopback_elsewhere(pair):
    pair[1].hosts = ["127.0.1.1 node0", f"{pair[1].address} node1"]
    codes, ranks = check(pair, master="node0")
    assert set(codes.values()) == {1}
    found = errors(ranks[2])[0]
    assert found["id"] == "comm/name-resolution"
    assert "node0 resolves to 127.0.1.1 on node1" in found["cause"]


@full
def test_a_node_of_another_world_size(pair):
    other = {rank: {"WORLD_SIZE": "6"} for rank in (2, 3)}
    expect(
        *check(pair, environment=other, deadline=PATIENT),
        "launch/world-size-mismatch",
        "ranks 2, 3",
        "node1",
        "for 6 ranks",
    )


@full
def test_two_nodes_with_the_same_number(pair):
    twice = {2: {"RANK": "0"}, 3: {"RANK": "1"}}
    codes, ranks = check(pair, environment={**twice, 2: {"RANK": "0", "TORCHELASTIC_USE_AGENT_STORE": "True"}})
    assert set(codes.values()) == {1}
    assert errors(ranks[0])[0]["id"] == "launch/world-size-mismatch"
    assert "started twice" in errors(ranks[0])[0]["cause"]


@full
@pytest.mark.parametrize("what", ["torch", "ds_config"])
def test_a_node_that_runs_something_else(pair, tmp_path, what):
    one, other = tmp_path / "a.json", tmp_path / "b.json"
    one.write_text('{"zero_optimization": {"stage": 1}}')
    other.write_text('{"zero_optimization": {"stage": 2}}' if what == "ds_config" else one.read_text())
    versions = tmp_path / "old" / "torch-2.1.0.dist-info"
    versions.mkdir(parents=True)
    (versions / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.1.0\n")
    path = {"PYTHONPATH": f"{tmp_path / 'old'}:{nodes.ROOT}"} if what == "torch" else {}
    ranks = nodes.start_ranks(pair[:1], ["--deadline", "5", str(one)], environment=_of_four(0, 1))
    far = nodes.start_ranks(
        pair[1:], ["--deadline", "5", str(other)], master=pair[0].address, environment=_of_four(2, 3, **path)
    )
    ranks |= {rank + 2: process for rank, process in far.items()}
    codes = nodes.wait(ranks, DEADLINE + START)
    found = expect(codes, ranks, "version/rank-mismatch", what, "node1", "ranks 2, 3")
    assert found["evidence"][0]["rank"] == 2


def _of_four(*numbers: int, **more: str) -> dict:
    return {local: {"RANK": str(rank), "WORLD_SIZE": "4", **more} for local, rank in enumerate(numbers)}


@full
def test_a_rank_that_is_never_started(pair):
    codes, ranks = check(pair, left_out=[3])
    expect(codes, ranks, "comm/missing-rank", "rank 3 never came")


@full
def test_a_process_that_ends_before_the_meeting(pair):
    codes, ranks = check(pair, **fault("leaves_at_once", 3))
    assert codes == {0: 1, 1: 1, 2: 1, 3: 3}
    assert errors(ranks[0])[0]["id"] == "comm/missing-rank"
    assert "rank 3 never came" in errors(ranks[0])[0]["cause"]


@full
@pytest.mark.parametrize(
    ("kind", "rank", "identity", "says"),
    [
        ("dies_in_a_collective", 3, "comm/stalled-rank", "rank 3 died in all_reduce"),
        ("is_stopped_in_a_collective", 2, "comm/stalled-rank", "rank 2 was stopped by a signal"),
        ("stands_still_before_a_collective", 2, "comm/stalled-rank", "rank 2 stands still"),
        ("calls_another_collective", 3, "comm/collective-mismatch", "broadcast"),
        ("sends_wrong_values", 1, "comm/wrong-value", "the contribution of rank 1"),
        ("cannot_allocate", 2, "comm/failed-step", "rank 2 failed in allocation"),
    ],
)
def test_a_faulty_rank(pair, kind, rank, identity, says):
    expect(*check(pair, **fault(kind, rank)), identity, says)


@full
def test_a_port_that_is_taken(pair, tmp_path):
    holder = subprocess.Popen(
        [
            "ip",
            "netns",
            "exec",
            pair[0].namespace,
            "python3",
            "-c",
            f"import socket, time; s = socket.create_server(('', {nodes.PORT})); time.sleep(120)",
        ]
    )
    try:
        time.sleep(1.0)
        codes, ranks = check_only_codes(pair)
    finally:
        holder.kill()
        holder.wait()
    assert set(codes.values()) == {1}
    for speaker, sure in ((0, True), (2, False)):  # the other node knows that nobody answers there, and says so
        found = errors(ranks[speaker])[0]
        assert found["id"] == "launch/port-in-use"
        assert (found["caveat"] is None) == sure
        assert str(nodes.PORT) in found["cause"]


def check_only_codes(both):
    ranks = nodes.start_ranks(both, ["--deadline", str(DEADLINE)])
    return nodes.wait(ranks, DEADLINE + START), ranks


@full
def test_little_shared_memory(pair):
    pair[1].shm = 4 << 20
    expect(*check(pair), "memory/shm-exhausted", "/dev/shm", "2")


@full
def test_started_by_torchrun(tmp_path):
    """The agent of torchrun holds the store; its ranks speak with one voice."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with nodes.network(1, tmp_path) as (node,):
        import os
        import sys

        launch = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", "--nproc-per-node=2"]
        launch += [f"--master-port={port}", "-m", "dsdoctor", "comm", "--json", "--device", "cpu"]
        process = node.start(launch, {**os.environ, "PYTHONPATH": str(nodes.ROOT), "OMP_NUM_THREADS": "1"})
        codes = nodes.wait({0: process}, DEADLINE + 2 * START)
    assert codes == {0: 0}, process.errors
    assert [member["launcher"] for member in process.document["comm"]["members"]] == ["torchrun", "torchrun"]
