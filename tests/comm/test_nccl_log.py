"""What NCCL logged, in lines of real logs of several releases."""

import gzip

import pytest

from dsdoctor.comm.nccl_log import MEANINGS, NcclSummary, read_summary

SOCKETS = """\
epoch 1 loss 2.3
vm:28471:28471 [0] NCCL INFO NCCL version 2.22.3+cuda12.5
vm:28471:28471 [0] NCCL INFO Bootstrap : Using eth0:172.17.16.64<0>
vm:28471:28471 [0] NCCL INFO NET/IB : No device found.
vm:28471:28471 [0] NCCL INFO NET/IB : Using [RO]; OOB eth0:172.17.16.64<0>
vm:28471:28471 [0] NCCL INFO Failed to initialize NET plugin IB
vm:28471:28471 [0] NCCL INFO NET/Socket : Using [0]eth0:172.17.16.64<0> [1]ztyou3pbk2:192.168.193.155<0>
vm:28471:28471 [0] NCCL INFO Using network Socket
vm:28471:28471 [0] NCCL INFO NCCL_P2P_DISABLE set by environment to 1
vm:28471:28471 [0] NCCL INFO NCCL_SHM_DISABLE set by environment to 1.
vm:28471:28471 [0] NCCL INFO Channel 00/02 :    0   1
vm:28471:28471 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [receive] via NET/Socket/0
vm:28471:28471 [0] NCCL INFO Channel 01/0 : 1[0] -> 0[0] [receive] via NET/Socket/0
vm:28471:28471 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0
"""
MIXED = """\
NCCL version 2.30.7+cuda13.0
node0:7:19 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/RoCE [RO]; OOB eth0:10.0.0.1<0>
node0:7:19 [0] NCCL INFO Using network IB
node0:7:19 [0] NCCL INFO P2P is disabled between connected GPUs 1 and 0. You can repress this message with \
NCCL_IGNORE_DISABLED_P2P=1.
node0:7:19 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read
node0:7:19 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[1] via P2P/CUMEM/read
node0:7:19 [1] NCCL INFO Channel 00 : 1[2d000] -> 2[2e000] via SHM/direct/direct
node0:7:19 [0] NCCL INFO Channel 00/0 : 7[7] -> 8[0] [send] via NET/IB/3/GDRDMA
node1:9:21 [0] NCCL INFO Channel 00/0 : 7[7] -> 8[0] [receive] via NET/IB/1/GDRDMA
NCCL DIAG === NCCL Diagnostics ===
NCCL DIAG [INFO] p2p: only 52/56 GPU-to-GPU peer accesses passed verification
"""
WARNS = """\
a:1:2 [0] misc/socket.cc:484 NCCL WARN socketStartConnect: Connect to 172.17.0.9<41234> failed : No route to host
a:1:2 [1] misc/socket.cc:484 NCCL WARN socketStartConnect: Connect to 172.17.0.9<50001> failed : No route to host
a:1:2 [0] init.cc:7 NCCL WARN something that nobody has seen yet
"""


def fed(text: str) -> dict[str, list[str]]:
    summary = NcclSummary()
    summary.feed(text.encode())
    rows: dict[str, list[str]] = {}
    for name, value in summary.table():
        rows.setdefault(name, []).append(value)
    return rows


def test_sockets():
    assert fed(SOCKETS) == {
        "version": ["2.22.3+cuda12.5"],
        "network": ["Socket"],
        "interface": ["eth0, ztyou3pbk2"],
        "via NET/Socket": ["3 channels between 2 pairs of ranks"],
        "set": ["NCCL_P2P_DISABLE=1, NCCL_SHM_DISABLE=1"],
        "not used": ["NET/IB : No device found", "Failed to initialize NET plugin IB"],
    }


def test_several_ways():
    """Both ends of a channel over the network log it; it is one."""
    rows = fed(MIXED)
    assert rows["version"] == ["2.30.7+cuda13.0"]
    assert rows["InfiniBand or RoCE"] == ["[0]mlx5_0:1/IB [1]mlx5_1:1/RoCE [RO]"]
    assert rows["via P2P/CUMEM"] == ["2 channels between 1 pair of ranks"]
    assert rows["via SHM/direct"] == ["1 channel between 1 pair of ranks"]
    assert rows["via NET/IB/GDRDMA"] == ["1 channel between 1 pair of ranks"]
    assert rows["not used"] == ["P2P is disabled between connected GPUs 1 and 0"]
    assert rows["diagnostics"][-1] == "[INFO] p2p: only 52/56 GPU-to-GPU peer accesses passed verification"


def test_warnings_are_counted_and_explained():
    rows = fed(WARNS)
    assert rows["warning (2 times)"] == ["socketStartConnect: Connect to 172.17.0.9<…> failed : No route to host"]
    assert rows[""] == ["→ a connection did not come about: interface, route or firewall"]
    assert rows["warning"] == ["something that nobody has seen yet"]  # and no meaning is made up


@pytest.mark.parametrize(
    ("warning", "word"),
    [
        ("P2P is disabled between NVLINK connected GPUs 1 and 0. This should not be the case", "fabric manager"),
        ("Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000", "LOCAL_RANK"),
        ("NET/IB : Got completion from peer 10.0.3.7<58414> with error 12, opcode 1, len 0", "InfiniBand"),
        ("Call to ibv_reg_mr failed with error Cannot allocate memory", "ulimit -l"),
        ("Call to posix_fallocate failed : No space left on device", "/dev/shm"),
        ("Error while creating shared memory segment /dev/shm/nccl-1aBc (size 9637888)", "/dev/shm"),
        ("Call to connect returned Connection refused, retrying", "firewall"),
        ("Message truncated : received 1024 bytes instead of 256", "sizes"),
        ("Cuda failure 2 'out of memory'", "CUDA"),
    ],
)
def test_what_warnings_mean(warning, word):
    shown = fed(f"a:1:2 [0] x.cc:1 NCCL WARN {warning}\n")
    assert word in shown[""][0]


def test_every_meaning_fits_on_a_line():
    assert all(len(means) < 100 for _, means in MEANINGS)


def test_a_log_without_nccl():
    summary = NcclSummary()
    summary.feed(b"epoch 1 loss 2.3\n\xff\x00\n")
    assert summary.silent
    assert summary.table() == []


def test_what_is_kept_is_bounded():
    summary = NcclSummary()
    for number in range(5000):
        summary.feed(f"a:1:2 [0] NCCL WARN failure of kind {number}\n".encode())
    assert len(summary.warnings) == 1000


def test_folders_and_compressed_files(tmp_path):
    (tmp_path / "nccl.node0.7.log").write_text(SOCKETS)
    with gzip.open(tmp_path / "nccl.node1.9.log.gz", "wt") as file:
        file.write(MIXED)
    summary = read_summary([str(tmp_path)])
    assert set(summary.networks) == {"Socket", "IB"}
    assert summary.to_dict()["channels"]["NET/Socket"] == {"1-0": 2, "0-1": 1}
