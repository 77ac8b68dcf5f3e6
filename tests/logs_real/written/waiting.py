# ruff: noqa: E501
"""Logs about ranks that wait: watchdogs of several releases, networks, rendezvous, and who it was that did not come."""

from tests.logs_real.written.communication import nccl_init
from tests.logs_real.written.parts import (
    SITE,
    WrittenLog,
    bar,
    ds,
    falling,
    launched,
    log,
    stopped,
    torchrun_failed,
    traceback,
    trainer,
    watchdog,
    watchdog_ends,
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


def terminated_watchdog() -> str:
    """torch 2.1, cut: only the lines of the watchdog's end, no first line."""
    lines = [
        f"[E ProcessGroupNCCL.cpp:852] [Rank {rank}] NCCL watchdog thread terminated with exception: [Rank {rank}] Watchdog caught collective operation timeout: "
        f"WorkNCCL(SeqNum=202558, OpType=_ALLGATHER_BASE, NumelIn=2359296, NumelOut=18874368, Timeout(ms)=1800000) ran for 180086{rank} milliseconds before timing out."
        for rank in (3, 7)
    ]
    return log(
        trainer(falling(40)),
        lines,
        "terminate called after throwing an instance of 'std::runtime_error'",
        stopped(-6, gpus=8),
    )


def blocking_wait() -> str:
    return log(
        trainer(falling(40)),
        [
            f"[rank{r}]:[E1002 18:16:40.711756918 ProcessGroupNCCL.cpp:756] [Rank {r}] Work WorkNCCL(SeqNum=2521, OpType=ALLREDUCE, NumelIn=160672064, NumelOut=160672064, Timeout(ms)=600000) timed out in blocking wait."
            for r in (0, 1, 3)
        ],
        torchrun_failed(1, rank=0, others=(1, 2, 3)),
    )


def detected_at_work() -> str:
    """Cut in the middle: only what came after the first line of each rank."""
    return log(
        [bar(311, 900)],
        [
            f"[rank{r}]:[E626 06:24:44.906457629 ProcessGroupNCCL.cpp:1785] [PG ID 0 PG GUID 0(default_pg) Rank {r}] Exception (either an error or timeout) detected by watchdog at work: 808, last enqueued NCCL work: 811, last completed NCCL work: 807."
            for r in (0, 1, 2)
        ],
        [
            f"[rank{r}]:[E626 06:24:44.906463018 ProcessGroupNCCL.cpp:630] [Rank {r}] Some NCCL operations have failed or timed out. Due to the asynchronous nature of CUDA kernels, subsequent GPU operations might run on corrupted/incomplete data."
            for r in (0, 1, 2)
        ],
        torchrun_failed(-6, rank=0, others=(1, 2, 3), name="SIGABRT"),
    )


def newest_watchdog() -> str:
    """torch 2.7 and later."""
    late = [
        f"[rank{r}]:[E511 10:40:0{r}.408271257 ProcessGroupNCCL.cpp:684] [Rank {r}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=808, OpType=ALLREDUCE, NumelIn=9801523, NumelOut=9801523, Timeout(ms)=600000) ran for 60002{r} milliseconds before timing out."
        for r in (0, 1, 3)
    ]
    more = [
        f"[rank{r}]:[E511 10:40:0{r}.508271257 ProcessGroupNCCL.cpp:2271] [PG ID 0 PG GUID 0(default_pg) Rank {r}]  failure detected by watchdog at work sequence id: 808 PG status: last enqueued work: 811, last completed work: 807"
        for r in (0, 1, 3)
    ]
    dump = "[rank2]:[E511 10:40:05.1 ProcessGroupNCCL.cpp:1537] [PG ID 0 PG GUID 0(default_pg) Rank 2] Received a dump signal due to a collective timeout from  rank 0 and we will try our best to dump the debug info. Last enqueued NCCL work: 807, last completed NCCL work: 807.This is most likely caused by incorrect usages of collectives, e.g., wrong sizes used across ranks, the order of collectives is not same for all ranks or the scheduled collective, for some reason, didn't run."
    return log(trainer(falling(40)), late, more, dump, torchrun_failed(-6, rank=0, others=(1, 2, 3), name="SIGABRT"))


def heartbeat() -> str:
    """The watchdog itself stands still: a hang inside CUDA or NCCL."""
    lines = []
    for r in range(2):
        lines += [
            f"[rank{r}]:[E ProcessGroupNCCL.cpp:1316] [PG 0 Rank {r}] Heartbeat monitor timed out! Process will be terminated after dumping debug info. workMetaList_.size()=103",
            f"[rank{r}]:[F ProcessGroupNCCL.cpp:1169] [PG 0 Rank {r}] [PG 0 Rank {r}] ProcessGroupNCCL's watchdog got stuck for 600 seconds without making progress in monitoring enqueued collectives. This typically indicates a NCCL/CUDA API hang blocking the watchdog, and could be triggered by another thread holding the GIL inside a CUDA api, or other deadlock-prone behaviors.",
        ]
    return log(trainer(falling(40)), lines, torchrun_failed(-6, rank=0, others=(1,), name="SIGABRT"))


def illegal_access_in_watchdog() -> str:
    """No Python traceback: the CUDA error is in the watchdog's end; the peers time out half an hour later."""
    lines = [
        "[rank1]:[E107 10:50:18.780482185 ProcessGroupNCCL.cpp:1504] [PG 0 (default_pg) Rank 1] Process group watchdog thread terminated with exception: CUDA error: an illegal memory access was encountered",
        "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.",
        "For debugging consider passing CUDA_LAUNCH_BLOCKING=1",
        "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.",
        "",
        "Exception raised from c10_cuda_check_implementation at ../c10/cuda/CUDAException.cpp:43 (most recent call first):",
        "frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x96 (0x7725d5f76e96 in libc10.so)",
        "",
        "terminate called after throwing an instance of 'c10::DistBackendError'",
    ]
    return log(trainer(falling(61)), lines, [watchdog(r, 931, "ALLREDUCE", numel=4096) for r in (0, 2, 3)],
               torchrun_failed(-6, rank=1, others=(0, 2, 3), name="SIGABRT"))  # fmt: skip


def ecc_in_watchdog() -> str:
    lines = [
        "[default0]:[rank12]:[E817 17:40:34.227531918 ProcessGroupNCCL.cpp:1515] [PG 0 (default_pg) Rank 12] Process group watchdog thread terminated with exception: CUDA error: uncorrectable ECC error encountered",
        "[default0]:Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.",
    ]
    return log(trainer(falling(61)), lines, torchrun_failed(-6, rank=0, others=(1, 2, 3), name="SIGABRT"))


def nvlink() -> str:
    return log(
        trainer(falling(61)),
        traceback(
            "RuntimeError",
            "CUDA error: uncorrectable NVLink error detected during the execution\nCUDA kernel errors might be asynchronously reported at some other API call.",
            ("train.py", 61, "step", "loss.item()"),
            prefix="[rank4]: ",
        ),
        torchrun_failed(1, rank=4, others=(0, 1)),
    )


def launch_failure() -> str:
    return log(
        trainer(falling(61)),
        "[rank3]:[E107 10:50:18.780482185 ProcessGroupNCCL.cpp:1595] [PG ID 0 PG GUID 0(default_pg) Rank 3] Process group watchdog thread terminated with exception: CUDA error: unspecified launch failure",
        "terminate called after throwing an instance of 'c10::DistBackendError'",
        "  what():  [PG ID 0 PG GUID 0(default_pg) Rank 3] Process group watchdog thread terminated with exception: CUDA error: unspecified launch failure",
        stopped(-6),
    )


def device_assert_in_watchdog() -> str:
    return log(
        trainer(falling(61)),
        '../aten/src/ATen/native/cuda/ScatterGatherKernel.cu:144: operator(): block: [0,0,0], thread: [3,0,0] Assertion `idx_dim >= 0 && idx_dim < index_size && "index out of bounds"` failed.',
        "[rank0]:[E107 10:50:18.780482185 ProcessGroupNCCL.cpp:1595] [PG ID 0 PG GUID 0(default_pg) Rank 0] Process group watchdog thread terminated with exception: CUDA error: device-side assert triggered",
        torchrun_failed(-6, rank=0, others=(1,), name="SIGABRT"),
    )


def lost_gpu_of_smi() -> str:
    return log(
        trainer(falling(61)),
        "Unable to determine the device handle for GPU0000:3B:00.0: GPU is lost.  Reboot the system to recover this GPU",
        traceback("RuntimeError", "CUDA error: unknown error", ("train.py", 61, "step", "loss.item()")),
        torchrun_failed(1),
    )


def no_communicator() -> str:
    """The first collective of torch 2.4: the key of the communicator never comes, rank 0 maps the data set."""
    maps = [
        f"Map (num_proc=16):  {p}%|██        | {p * 900}/90000 [03:{p}<30:00, 52.1 examples/s]" for p in (20, 40, 60)
    ]
    text = "[{r}] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value store by key '0', but store->get('0') got error: wait timeout after 600000ms, keys: /default_pg/0//cuda//0"
    return log(launched(gpus=4), maps, [line for r in (1, 2, 3) for line in traceback("torch.distributed.DistBackendError", text.format(r=r), BARRIER, prefix=f"[rank{r}]: ")],
               torchrun_failed(1, rank=1, others=(0, 2, 3)))  # fmt: skip


def tokenising_before_numel() -> str:
    """torch 1.13 says no number of elements."""
    maps = [
        f"Running tokenizer on train dataset #{n}:  {p}%|███       | {p}/211 [10:0{n}<20:00, 4.1ba/s]"
        for n, p in ((0, 31), (1, 60))
    ]
    late = [
        f"[E ProcessGroupNCCL.cpp:821] [Rank {r}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1, OpType=BARRIER, Timeout(ms)=1800000) ran for 180{r}412 milliseconds before timing out."
        for r in (1, 2, 3)
    ]
    return log(launched(gpus=4), maps, late, stopped(-6, gpus=4))


def gloo_tokenising() -> str:
    maps = [
        f"Tokenizing train dataset (num_proc=8):  {p}%|███       | {p * 900}/90000 [10:{p}<20:00, 95.1 examples/s]"
        for p in (20, 40, 60)
    ]
    message = "[../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete"
    return log(
        maps, traceback("RuntimeError", message, BARRIER, prefix="[rank1]: "), torchrun_failed(1, rank=1, others=(0,))
    )


def monitored_barrier() -> str:
    message = "Rank 3 failed to pass monitoredBarrier in 300000 ms"
    return log(
        trainer(falling(30)),
        traceback(
            "RuntimeError",
            f"[../torch/csrc/distributed/c10d/ProcessGroupGloo.cpp:2841] {message}",
            ("train.py", 91, "sync", "dist.monitored_barrier()"),
            prefix="[rank0]: ",
        ),
        torchrun_failed(1, rank=0, others=(1, 2, 3)),
    )


def monitored_before_training() -> str:
    message = "Ranks 2, 5 failed to pass monitoredBarrier in 60000 ms"
    return log(
        launched(gpus=8),
        traceback("RuntimeError", message, ("train.py", 31, "setup", "dist.monitored_barrier()"), prefix="[rank0]: "),
        stopped(1, gpus=8),
    )


def fingerprint() -> str:
    message = "Detected mismatch between collectives on ranks. Rank 1 is running collective: CollectiveFingerPrint(SequenceNumber=42, OpType=ALLREDUCE, TensorShape=[17], TensorDtypes=Float), but Rank 0 is running collective: CollectiveFingerPrint(SequenceNumber=42, OpType=BROADCAST)."
    return log(
        trainer(falling(8)),
        traceback("RuntimeError", message, ("train.py", 91, "sync", "dist.all_reduce(flags)"), prefix="[rank1]: "),
        torchrun_failed(1, rank=1, others=(0,)),
    )


def other_call_at_the_end() -> str:
    """The number of batches is told, and at the end one rank is in the next barrier: uneven, not a mismatch of code."""
    return log(
        ["[rank0]: len(train_dataloader) = 212", "[rank1]: len(train_dataloader) = 194"],
        trainer(falling(194), total=212),
        watchdog(0, 5210, "ALLREDUCE", numel=7340032),
        watchdog(1, 5210, "ALLREDUCE", numel=1),
        torchrun_failed(-6, rank=0, others=(1,), name="SIGABRT"),
    )


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


def moe_of_qwen() -> str:
    config = ["{", '  "model_type": "qwen3_moe",', '  "num_experts": 128,', '  "num_experts_per_tok": 8', "}"]
    return log(config, ZERO3, trainer(falling(3)), [watchdog(r, 4410, "_ALLGATHER_BASE", numel=2359296, out=18874368) for r in range(8)],
               torchrun_failed(-6, rank=0, others=(1, 2), name="SIGABRT"))  # fmt: skip


def generate_in_stacks() -> str:
    """py-spy's stacks of a job that stands still in the evaluation."""
    spy = [
        'Thread 4101 (active): "MainThread"',
        "    all_gather_into_tensor (torch/distributed/distributed_c10d.py:3709)",
        "    fetch_sub_module (deepspeed/runtime/zero/partitioned_param_coordinator.py:371)",
        "    _sample (transformers/generation/utils.py:2982)",
        "    generate (transformers/generation/utils.py:2024)",
    ]
    return log(
        ZERO3,
        trainer(falling(20)),
        spy,
        [watchdog(r, 9314, "_ALLGATHER_BASE", numel=88200, out=352800) for r in (1, 2)],
        torchrun_failed(-6, rank=1, others=(0,), name="SIGABRT"),
    )


def one_rank_out_of_memory() -> str:
    """Rank 3 ran out of memory and hangs in its handler; the others' watchdogs follow ten minutes later."""
    text = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total capacity of 79.15 GiB of which 1.12 GiB is free."
    where = (f"{SITE}/deepspeed/runtime/engine.py", 1976, "backward", "self.optimizer.backward(loss)")
    return log(trainer(falling(20)), traceback("torch.OutOfMemoryError", text, where, prefix="[rank3]: "), [watchdog(r, 931, "ALLREDUCE", numel=4096) for r in (0, 1, 2)],
               [line for r in (0, 1) for line in watchdog_ends(r, 931)], torchrun_failed(-6, rank=0, others=(1, 2, 3), name="SIGABRT"))  # fmt: skip


CASES = (
    WrittenLog(name="terminated-watchdog", text=terminated_watchdog(), primary="comm/timeout", absent=("launch/abort", "zero3/moe-hang"), line="Watchdog"),
    WrittenLog(name="blocking-wait", text=blocking_wait(), primary="comm/timeout", line="blocking wait", absent=("launch/user-exception",)),
    WrittenLog(name="detected-at-work", text=detected_at_work(), primary="comm/timeout", absent=("launch/abort",)),
    WrittenLog(name="newest-watchdog", text=newest_watchdog(), primary="comm/timeout", absent=("launch/abort", "comm/collective-mismatch")),
    WrittenLog(name="heartbeat", text=heartbeat(), primary="comm/timeout", absent=("launch/abort",)),
    WrittenLog(name="illegal-access-in-watchdog", text=illegal_access_in_watchdog(), primary="cuda/illegal-access", absent=("launch/abort", "comm/timeout", "launch/user-exception")),
    WrittenLog(name="ecc-in-watchdog", text=ecc_in_watchdog(), primary="hardware/gpu-fault", absent=("launch/abort", "launch/user-exception", "cuda/illegal-access")),
    WrittenLog(name="nvlink", text=nvlink(), primary="hardware/gpu-fault", absent=("launch/user-exception",)),
    WrittenLog(name="launch-failure", text=launch_failure(), primary="cuda/illegal-access", absent=("launch/abort", "launch/user-exception")),
    WrittenLog(name="device-assert-in-watchdog", text=device_assert_in_watchdog(), primary="cuda/device-assert", line="Assertion", absent=("launch/abort",)),
    WrittenLog(name="lost-gpu-of-smi", text=lost_gpu_of_smi(), primary="hardware/gpu-fault", absent=("launch/user-exception",)),
    WrittenLog(name="no-communicator", text=no_communicator(), primary="comm/rank0-work-timeout", absent=("launch/user-exception", "comm/p2p-hang")),
    WrittenLog(name="tokenising-before-numel", text=tokenising_before_numel(), primary="comm/rank0-work-timeout", absent=("comm/timeout", "launch/abort")),
    WrittenLog(name="gloo-tokenising", text=gloo_tokenising(), primary="comm/rank0-work-timeout", absent=("comm/timeout",)),
    WrittenLog(name="monitored-barrier", text=monitored_barrier(), primary="comm/stalled-rank", absent=("launch/user-exception",)),
    WrittenLog(name="monitored-before-training", text=monitored_before_training(), primary="comm/missing-rank", accept=("comm/stalled-rank",), absent=("launch/user-exception",)),
    WrittenLog(name="fingerprint", text=fingerprint(), primary="comm/collective-mismatch", absent=("launch/user-exception",)),
    WrittenLog(name="other-call-at-the-end", text=other_call_at_the_end(), primary="hang/uneven-batches", absent=("comm/collective-mismatch", "launch/abort")),
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
    WrittenLog(name="moe-of-qwen", text=moe_of_qwen(), primary="zero3/moe-hang", absent=("comm/timeout", "launch/abort", "zero3/branch-hang")),
    WrittenLog(name="generate-in-stacks", text=generate_in_stacks(), primary="zero3/generate-hang", absent=("comm/timeout", "launch/abort")),
    WrittenLog(name="one-rank-out-of-memory", text=one_rank_out_of_memory(), primary="memory/gpu-oom-step", absent=("comm/timeout", "launch/abort"), also=("launch/peer-failure",)),
)  # fmt: skip
