# ruff: noqa: E501
"""Logs about networks, rendezvous and stores: who cannot be reached, by which interface, and who did not come."""

from tests.logs_real.written.communication import nccl_init
from tests.logs_real.written.parts import (
    SITE,
    WrittenLog,
    ds,
    falling,
    launched,
    log,
    stopped,
    torchrun_failed,
    traceback,
    trainer,
    watchdog,
)

BARRIER = (f"{SITE}/torch/distributed/distributed_c10d.py", 3703, "barrier", "work = default_pg.barrier(opts=opts)")
INIT = (
    f"{SITE}/torch/distributed/distributed_c10d.py",
    1177,
    "init_process_group",
    "store, rank, world_size = next(rendezvous_iterator)",
)
STORE = (f"{SITE}/torch/distributed/rendezvous.py", 189, "_create_c10d_store", "return TCPStore(")
DS_INIT = (
    f"{SITE}/deepspeed/comm/comm.py",
    670,
    "init_distributed",
    "cdb = TorchBackend(dist_backend, timeout, init_method, rank, world_size)",
)
ZERO3 = ds("Creating torch.bfloat16 ZeRO stage 3 optimizer")


def nccl_error(
    rank: int,
    last: str,
    kind: str = "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.",
) -> list[str]:
    message = f"NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:268, unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.21.5\n{kind}\nLast error:\n{last}"
    return traceback("torch.distributed.DistBackendError", message, BARRIER, prefix=f"[rank{rank}]: ")


def client_timed_out() -> str:
    message = "The client socket has timed out after 600000ms while trying to connect to (10.12.0.4, 29500)."
    return log(
        "[E socket.cpp:957] [c10d] The client socket has timed out after 600000ms while trying to connect to (10.12.0.4, 29500).",
        traceback("torch.distributed.DistNetworkError", message, DS_INIT, INIT, STORE, prefix="worker-1: "),
    )


def client_lines_only() -> str:
    """Cut to torch's own lines."""
    return log(
        launched(),
        "[W socket.cpp:697] [c10d] The client socket has failed to connect to [node01]:29500 (errno: 110 - Connection timed out).",
        "[E socket.cpp:860] [c10d] The client socket has timed out after 1800s while trying to connect to (10.12.0.4, 29500).",
        stopped(1),
    )


def rendezvous_connection() -> str:
    """torchrun cannot reach the node of the rendezvous."""
    inner = traceback(
        "RuntimeError",
        "connect() timed out. Original timeout was 60000 ms.",
        (
            f"{SITE}/torch/distributed/elastic/rendezvous/c10d_rendezvous_backend.py",
            155,
            "_create_tcp_store",
            "store = TCPStore(",
        ),
    )
    outer = traceback("torch.distributed.elastic.rendezvous.api.RendezvousConnectionError", "The connection to the C10d store has failed. See inner exception for details.",
                      (f"{SITE}/torch/distributed/elastic/rendezvous/c10d_rendezvous_backend.py", 163, "_create_tcp_store", "raise RendezvousConnectionError("))  # fmt: skip
    return log(inner, "", "The above exception was the direct cause of the following exception:", "", outer)


def rendezvous_lost_in_training() -> str:
    """The other node's agent went away in the midst of training: why stands in its log."""
    text = traceback("torch.distributed.elastic.rendezvous.api.RendezvousConnectionError", "The connection to the C10d store has failed. See inner exception for details.",
                     (f"{SITE}/torch/distributed/elastic/rendezvous/c10d_rendezvous_backend.py", 119, "_call_store", "raise RendezvousConnectionError("))  # fmt: skip
    own = traceback("IndexError", "list index out of range", ("data.py", 44, "collate", "rows[i]"), prefix="[rank0]: ")
    return log(trainer(falling(30)), own, text)


def rendezvous_timeout() -> str:
    return log(
        traceback("torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError", "",
                  (f"{SITE}/torch/distributed/elastic/rendezvous/dynamic_rendezvous.py", 699, "run", "raise RendezvousTimeoutError()")),
    )  # fmt: skip


def store_waits() -> str:
    message = "Timed out after 1801 seconds waiting for clients. 3/4 clients joined."
    return log(
        launched(gpus=4),
        traceback("torch.distributed.DistStoreError", message, DS_INIT, INIT, STORE, prefix="[rank0]: "),
        stopped(1, gpus=4),
    )


def no_route() -> str:
    return log(
        nccl_init("node01", 4100, 0),
        "node01:4100:4180 [0] misc/socket.cc:484 NCCL WARN socketStartConnect: Connect to 10.0.0.12<43217> failed : No route to host",
        nccl_error(0, "socketStartConnect: Connect to 10.0.0.12<43217> failed : No route to host"),
        torchrun_failed(1),
    )


def connection_abort() -> str:
    """Only the exception, without NCCL_DEBUG."""
    return log(
        nccl_error(1, "socketStartConnect: Connect to 10.0.0.2<45763> failed : Software caused connection abort"),
        torchrun_failed(1, rank=1),
    )


def link_local() -> str:
    return log(
        "node01:4100:4180 [0] NCCL INFO NET/Socket : Using [0]ib1:fe80::966d:ae03:a2:8cf0%ib1<0>",
        "node01:4100:4180 [0] misc/socket.cc:483 NCCL WARN socketStartConnect: Connect to fe80::966d:ae03:a2:8cf0%ib1<17943> failed : Software caused connection abort",
        nccl_error(
            0,
            "socketStartConnect: Connect to fe80::966d:ae03:a2:8cf0%ib1<17943> failed : Software caused connection abort",
        ),
    )


def no_such_interface() -> str:
    message = "[enforce fail at /pytorch/third_party/gloo/gloo/transport/tcp/device.cc:84] ifa != nullptr. Unable to find address for: eth0"
    return log(traceback("RuntimeError", message, DS_INIT, prefix="[rank0]: "), torchrun_failed(1, others=(1,)))


def no_bootstrap_interface() -> str:
    return log(
        "node01:4100:4100 [0] NCCL INFO NCCL_SOCKET_IFNAME set by environment to eth2",
        "node01:4100:4100 [0] bootstrap.cc:45 NCCL WARN Bootstrap : no socket interface found",
        nccl_error(0, "Bootstrap : no socket interface found", "ncclInternalError: Internal check failed."),
        torchrun_failed(1),
    )


def loopback_of_debian() -> str:
    message = "Gloo connectFullMesh failed with [../third_party/gloo/gloo/transport/tcp/pair.cc:144] no error"
    first = "[../third_party/gloo/gloo/transport/tcp/pair.cc:799] connect [127.0.1.1]:37105: Connection refused"
    return log(
        traceback("RuntimeError", first, DS_INIT, prefix="[rank1]: "),
        traceback("RuntimeError", message, DS_INIT, prefix="[rank0]: "),
    )


def full_mesh() -> str:
    message = (
        "Gloo connectFullMesh failed with [../third_party/gloo/gloo/transport/tcp/pair.h:301] Connect timeout [none]"
    )
    return log(traceback("RuntimeError", message, DS_INIT, prefix="[rank1]: "), torchrun_failed(1, rank=1, others=(0,)))


def resolver() -> str:
    lines = [
        "[W socket.cpp:601] [c10d] The IPv6 network addresses of (head-node, 29500) cannot be retrieved (gai error: -2 - Name or service not known).",
        "[W socket.cpp:601] [c10d] The IPv4 network addresses of (head-node, 29500) cannot be retrieved (gai error: -2 - Name or service not known).",
        "[E socket.cpp:957] [c10d] The client socket has timed out after 60s while trying to connect to (head-node, 29500).",
    ]
    return log(
        lines * 2,
        traceback(
            "torch.distributed.DistNetworkError",
            "The client socket has timed out after 60s while trying to connect to (head-node, 29500).",
            INIT,
            STORE,
        ),
    )


def store_went_away() -> str:
    """Rank 0 raised; the others find its store gone in torch 2.6's words."""
    own = traceback(
        "ZeroDivisionError", "division by zero", ("metrics.py", 12, "mean", "return total / count"), prefix="[rank0]: "
    )
    text = "[1] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value store by key '0', but got error: Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown or crash?"
    other = traceback("torch.distributed.DistBackendError", text, BARRIER, prefix="[rank1]: ")
    warn = "[rank1]:[W511 10:20:01.1 TCPStore.cpp:115] [c10d] recvVector failed on SocketImpl(fd=3, addr=[localhost]:49214, remote=[localhost]:29500): Failed to recv, got 0 bytes"
    return log(warn, other, own, torchrun_failed(1, rank=0, others=(1,)))


def ib_old_words() -> str:
    """NCCL 2.10: error instead of status."""
    return log(
        trainer(falling(60)),
        "node07:811:902 [3] transport/net_ib.cc:1016 NCCL WARN NET/IB : Got completion with error 12, opcode 1, len 32600, vendor err 129",
        nccl_error(
            3,
            "NET/IB : Got completion from peer 10.0.3.7<58414> with error 12, opcode 1, len 0, vendor err 129",
            "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
        ),
    )


def ib_plugin() -> str:
    return log(
        trainer(falling(60)),
        "hostname-test:984:1357 [4] ib_plugin.c:1615 NCCL WARN NET/IB : Got completion from peer 172.36.143.59<44206> with status=12 opcode=129 len=65536 vendor err 129 (Recv) localGid ::ffff:29.87.88.182 remoteGids::ffff:29.87.4.221",
        "hostname-test:984:1357 [4] NCCL INFO proxy.cc:874 -> 6 [Progress Thread]",
        watchdog(4, 5210, "ALLREDUCE", numel=7340032),
        torchrun_failed(-6, rank=4, others=(0, 1), name="SIGABRT"),
    )


def ib_new_words() -> str:
    return log(
        trainer(falling(60)),
        "mycl-g2:353236:353423 [6] transport/net_ib.cc:2244 NCCL WARN NET/IB: Got completion from peer 192.168.3.5<53908> with status=IBV_WC_RETRY_EXC_ERR(12) opcode=IBV_WC_RDMA_WRITE(1) reqSize=0 vendor_err=129 req_type=Recv localGid ::ffff:192.168.6.3 remoteGids::ffff:192.168.6.5 hca mlx5_10",
        "mycl-g2:353236:353423 [6] transport/net_ib.cc:2244 NCCL WARN NET/IB: Got completion from peer 192.168.3.5<53908> with status=IBV_WC_WR_FLUSH_ERR(5) opcode=IBV_WC_RDMA_WRITE(1) reqSize=0 vendor_err=249 req_type=Recv",
        torchrun_failed(-6, rank=6, others=(0, 1), name="SIGABRT"),
    )


def ib_memlock() -> str:
    return log(
        "node01:4100:4180 [0] misc/ibvwrap.cc:262 NCCL WARN Call to ibv_reg_mr failed",
        "node01:4100:4180 [0] misc/ibvwrap.cc:284 NCCL WARN Call to ibv_create_qp failed with error Cannot allocate memory errno 12",
        nccl_error(0, "Call to ibv_create_qp failed with error Cannot allocate memory"),
        torchrun_failed(1),
    )


def no_peer_access() -> str:
    last = "Cuda failure 217 'peer access is not supported between these two devices'"
    message = f"NCCL error in: /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:3699, unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.27.3\nncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n{last}"
    return log(traceback("torch.distributed.DistBackendError", message, BARRIER, prefix="(Runner pid=16018) "))


def ipc_handle() -> str:
    return log(
        "z-pc:909608:910337 [0] NCCL INFO Channel 00 : 0[2d000] -> 1[2e000] via P2P/IPC",
        "z-pc:909608:910337 [0] transport/p2p.cc:238 NCCL WARN failed to open CUDA IPC handle : 217 peer access is not supported between these two devices",
        traceback(
            "RuntimeError",
            "NCCL error in: ../torch/lib/c10d/ProcessGroupNCCL.cpp:784, unhandled cuda error, NCCL version 2.7.8",
            BARRIER,
        ),
    )


def stopped_in_the_first_collective() -> str:
    return log(
        launched(),
        nccl_init("ws4090", 4100, 0),
        nccl_init("ws4090", 4101, 1),
        "^CTraceback (most recent call last):",
        '  File "train.py", line 88, in <module>',
        "    engine, *_ = deepspeed.initialize(model=model, config=config)",
        f'  File "{SITE}/deepspeed/runtime/engine.py", line 1131, in _broadcast_model',
        "    dist.broadcast(p.data, groups._get_broadcast_src_rank(), group=self.seq_data_parallel_group)",
        f'  File "{SITE}/torch/distributed/distributed_c10d.py", line 2058, in broadcast',
        "    work.wait()",
        "KeyboardInterrupt",
    )


CASES = (
    WrittenLog(name="client-timed-out", text=client_timed_out(), primary="comm/unreachable", absent=("launch/user-exception",)),
    WrittenLog(name="client-lines-only", text=client_lines_only(), primary="comm/unreachable", absent=("launch/user-exception",)),
    WrittenLog(name="rendezvous-connection", text=rendezvous_connection(), primary="comm/unreachable", absent=("launch/user-exception",)),
    WrittenLog(name="rendezvous-lost-in-training", text=rendezvous_lost_in_training(), primary="launch/user-exception", line="IndexError", absent=("comm/unreachable",)),
    WrittenLog(name="rendezvous-timeout", text=rendezvous_timeout(), primary="comm/missing-rank", absent=("launch/user-exception",)),
    WrittenLog(name="store-waits", text=store_waits(), primary="comm/missing-rank", absent=("launch/world-size-mismatch",)),
    WrittenLog(name="no-route", text=no_route(), primary="comm/unreachable", absent=("comm/wrong-interface", "launch/user-exception", "comm/p2p-hang")),
    WrittenLog(name="connection-abort", text=connection_abort(), primary="comm/unreachable", absent=("launch/user-exception",)),
    WrittenLog(name="link-local", text=link_local(), primary="comm/wrong-interface", accept=("comm/unreachable",), absent=("launch/user-exception",)),
    WrittenLog(name="no-such-interface", text=no_such_interface(), primary="comm/wrong-interface", absent=("launch/user-exception",)),
    WrittenLog(name="no-bootstrap-interface", text=no_bootstrap_interface(), primary="comm/wrong-interface", absent=("launch/user-exception",)),
    WrittenLog(name="loopback-of-debian", text=loopback_of_debian(), primary="comm/name-resolution", absent=("launch/user-exception", "comm/unreachable")),
    WrittenLog(name="full-mesh", text=full_mesh(), primary="comm/unreachable", absent=("launch/user-exception",)),
    WrittenLog(name="resolver", text=resolver(), primary="comm/name-resolution", absent=("comm/unreachable",)),
    WrittenLog(name="store-went-away", text=store_went_away(), primary="launch/user-exception", line="division", also=("launch/peer-failure",)),
    WrittenLog(name="ib-old-words", text=ib_old_words(), primary="comm/ib-error", absent=("launch/user-exception",)),
    WrittenLog(name="ib-plugin", text=ib_plugin(), primary="comm/ib-error", absent=("launch/abort", "comm/timeout")),
    WrittenLog(name="ib-new-words", text=ib_new_words(), primary="comm/ib-error", absent=("launch/abort",)),
    WrittenLog(name="ib-memlock", text=ib_memlock(), primary="comm/ib-error", absent=("launch/user-exception",)),
    WrittenLog(name="no-peer-access", text=no_peer_access(), primary="comm/p2p-hang", absent=("launch/user-exception",)),
    WrittenLog(name="ipc-handle", text=ipc_handle(), primary="comm/p2p-hang", absent=("launch/user-exception",)),
    WrittenLog(name="stopped-in-the-first-collective", text=stopped_in_the_first_collective(), primary="comm/p2p-hang", also=("launch/cancelled",)),
)  # fmt: skip
