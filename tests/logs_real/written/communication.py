# ruff: noqa: E501
"""Logs about ranks that wait for each other: timeouts, hangs, networks, and runs that are only slow."""

from tests.logs_real.written.parts import (
    SITE,
    WrittenLog,
    bar,
    ds,
    falling,
    finished,
    launched,
    log,
    torchrun_failed,
    traceback,
    trainer,
    watchdog,
    watchdog_ends,
)


def nccl_init(host: str, pid: int, gpu: int, ranks: int = 2) -> list[str]:
    return [
        f"{host}:{pid}:{pid} [{gpu}] NCCL INFO Bootstrap : Using eth0:10.0.0.{gpu + 1}<0>",
        f"{host}:{pid}:{pid + 50} [{gpu}] NCCL INFO NET/IB : No device found.",
        f"{host}:{pid}:{pid + 50} [{gpu}] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.{gpu + 1}<0>",
        f"{host}:{pid}:{pid + 50} [{gpu}] NCCL INFO Using network Socket",
        f"{host}:{pid}:{pid + 50} [{gpu}] NCCL INFO Channel 00/0 : {gpu}[{gpu}] -> {1 - gpu}[{1 - gpu}] via P2P/IPC",
        f"{host}:{pid}:{pid + 50} [{gpu}] NCCL INFO Connected all rings",
        f"{host}:{pid}:{pid + 50} [{gpu}] NCCL INFO comm 0x55d1 rank {gpu} nranks {ranks} cudaDev {gpu} - Init COMPLETE",
    ]


def p2p_hang() -> str:
    """Peer-to-peer channels are set up, then the very first collective never ends, on all ranks."""
    return log(
        launched(),
        nccl_init("ws4090", 4100, 0),
        nccl_init("ws4090", 4101, 1),
        [watchdog(rank, 1, "ALLREDUCE", numel=1) for rank in range(2)],
        [line for rank in range(2) for line in watchdog_ends(rank, 1)],
    )


def generate_hang() -> str:
    """Rank 1 generates longer than the others; under ZeRO-3 they go on to the next reduction."""
    late = [watchdog(0, 9314, "ALLREDUCE", numel=4), watchdog(2, 9314, "ALLREDUCE", numel=4)]
    late += [watchdog(1, 9314, "_ALLGATHER_BASE", numel=88200, out=352800)]
    where = (f"{SITE}/transformers/generation/utils.py", 2215, "generate", "result = self._sample(")
    ended = traceback("torch.distributed.DistBackendError", "NCCL communicator was aborted on rank 1.", where,
                      prefix="[rank1]: ")  # fmt: skip
    return log(
        ds("Creating torch.bfloat16 ZeRO stage 3 optimizer"),
        trainer(falling(20)),
        [bar(3, 12, title="Evaluating")],
        late,
        ended,
        torchrun_failed(-6, rank=0, name="SIGABRT"),
    )


def plain_timeout() -> str:
    """Seven ranks of eight wait; nothing else is known."""
    ranks = [0, 1, 2, 3, 4, 6, 7]
    return log(
        trainer(falling(50)),
        [watchdog(rank, 1580, "ALLREDUCE", numel=466119168) for rank in ranks],
        [line for rank in ranks[:2] for line in watchdog_ends(rank, 1580)],
        torchrun_failed(-6, rank=0, others=(1, 5), name="SIGABRT"),
    )


def old_watchdog() -> str:
    """torch 1.12: no sizes; the first lines have no rank in front."""
    lines = [
        f"[E ProcessGroupNCCL.cpp:719] [Rank {rank}] Watchdog caught collective operation timeout: "
        f"WorkNCCL(SeqNum=96120, OpType=ALLREDUCE, Timeout(ms)=1800000) ran for 1804{rank}12 milliseconds before timing out."
        for rank in (0, 1, 3)
    ]
    return log(trainer(falling(30)), lines,
               "terminate called after throwing an instance of 'std::runtime_error'",
               "  what():  [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=96120, "
               "OpType=ALLREDUCE, Timeout(ms)=1800000) ran for 1804012 milliseconds before timing out.")  # fmt: skip


def tokenising() -> str:
    """Rank 0 maps the data set for longer than ten minutes while the others stand at the barrier."""
    maps = [
        f"Running tokenizer on dataset:  {p}%|███       | {p * 1000}/100000 [{p // 7}:00<20:00, 140.1 examples/s]"
        for p in (10, 30, 60)
    ]
    return log(launched(gpus=4), maps, [watchdog(rank, 1, "ALLREDUCE", numel=1) for rank in (1, 2, 3)],
               list(watchdog_ends(1, 1)))  # fmt: skip


def gloo_waits() -> str:
    message = ("[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1800000ms for recv "
               "operation to complete")  # fmt: skip
    where = (f"{SITE}/torch/distributed/distributed_c10d.py", 4164, "barrier", "work.wait()")
    return log(
        ["step 10 loss 2.31", "step 20 loss 2.24"], traceback("RuntimeError", message, where, prefix="[rank0]: ")
    )


def docker_bridge() -> str:
    lines = []
    for rank in range(2):
        lines += [
            f"node0{rank}:311:311 [0] NCCL INFO Bootstrap : Using docker0:172.17.0.1<0>",
            f"node0{rank}:311:360 [0] NCCL INFO NET/Socket : Using [0]docker0:172.17.0.1<0> [1]eth0:10.1.2.{rank}<0>",
        ]
    lines += [
        "node01:311:360 [0] misc/socket.cc:484 NCCL WARN socketStartConnect: Connect to 172.17.0.1<49931> failed : "
        "Connection refused",
        "node01:311:360 [0] NCCL INFO bootstrap.cc:76 -> 2",
    ]
    message = ("NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1331, unhandled system error (run with "
               "NCCL_DEBUG=INFO for details), NCCL version 2.18.1")  # fmt: skip
    where = (f"{SITE}/torch/distributed/distributed_c10d.py", 3703, "barrier", "work = default_pg.barrier(opts=opts)")
    return log(lines, traceback("torch.distributed.DistBackendError", message, where))


def version_mismatch() -> str:
    """One node runs another NCCL (and torch) than the other."""
    lines = [
        "node01: DeepSpeed 0.14.4, torch 2.3.1+cu121",
        "node02: DeepSpeed 0.14.4, torch 2.1.0+cu118",
        "gpu01:700:700 [0] NCCL INFO NCCL version 2.20.5+cuda12.4",
        "gpu02:911:911 [0] NCCL INFO NCCL version 2.18.1+cuda11.8",
        "gpu02:911:960 [0] misc/socket.cc:50 NCCL WARN Message truncated : received 1048 bytes instead of 256",
        "gpu02:911:960 [0] NCCL INFO bootstrap.cc:550 -> 3",
    ]
    message = ("NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1691, internal error - please report "
               "this issue to the NCCL developers, NCCL version 2.18.1")  # fmt: skip
    where = (f"{SITE}/torch/distributed/distributed_c10d.py", 3703, "barrier", "work = default_pg.barrier(opts=opts)")
    return log(lines, traceback("torch.distributed.DistBackendError", message, where))


def offload_bound() -> str:
    """Nearly all of the step is the Adam of the CPU, with one thread."""
    lines = []
    for step in range(1, 31):
        lines += [
            f"time (ms) | optimizer_allgather: 410.12 | optimizer_gradients: 502.77 | optimizer_step: 21766.{step:02d}",
            "time (ms) | fwd_microstep: 376.60 | bwd_microstep: 864.56 | bwd_inner_microstep: 806.86 | "
            "bwd_allreduce_microstep: 57.62 | step_microstep: 22880.87",
            "time (ms) | fwd: 376.60 | bwd: 864.56 | bwd_inner: 806.87 | bwd_allreduce: 57.62 | step: 22880.87",
            bar(step, 400, speed="24.31s/it"),
        ]
    return log(
        "Setting OMP_NUM_THREADS environment variable for each process to be 1 in default, to avoid your system being "
        "overloaded, please further tune the variable for optimal performance in your application as needed.",
        "Adam Optimizer #0 is created with AVX512 arithmetic capability.",
        lines,
        finished(),
    )


def slow_not_hung() -> str:
    """Two steps a quarter of an hour, and the user stopped it as hung."""
    lines = [
        f"{done}/1000 [{done * 7}:32<{900 - done}:11:40, 452.{done}s/it]".join(("  0%|          | ", ""))
        for done in range(1, 9)
    ]
    ended = [
        "^CTraceback (most recent call last):",
        '  File "train.py", line 88, in <module>',
        "    main()",
        f'  File "{SITE}/transformers/generation/utils.py", line 2215, in generate',
        "    result = self._sample(",
        "KeyboardInterrupt",
    ]
    return log(launched(), lines, ended)


def infiniband() -> str:
    lines = [
        "node07:811:902 [3] transport/net_ib.cc:1298 NCCL WARN NET/IB : Got completion from peer 10.2.0.9<41422> with "
        "status=12 opcode=0 len=0 vendor err 129 (Recv) localGid fe80::1 remoteGids fe80::2",
        "node08:812:911 [1] transport/net_ib.cc:1298 NCCL WARN NET/IB : Got completion from peer 10.2.0.7<38222> with "
        "status=5 opcode=0 len=0 vendor err 249 (Recv)",
    ]
    message = "NCCL communicator encountered error set by ProcessGroupNCCL, ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely."
    where = (f"{SITE}/deepspeed/comm/torch.py", 205, "all_reduce", "return torch.distributed.all_reduce(")
    return log(
        trainer(falling(100)),
        lines,
        traceback("torch.distributed.DistBackendError", message, where, prefix="[rank59]: "),
    )


CASES = (
    WrittenLog(name="p2p-hang", text=p2p_hang(), primary="comm/p2p-hang", absent=("comm/rank0-work-timeout",)),
    WrittenLog(name="generate-hang", text=generate_hang(), primary="zero3/generate-hang",
               absent=("comm/timeout", "launch/user-exception")),
    WrittenLog(name="plain-timeout", text=plain_timeout(), primary="comm/timeout", line="Watchdog caught"),
    WrittenLog(name="old-watchdog", text=old_watchdog(), primary="comm/timeout", line="Watchdog caught"),
    WrittenLog(name="tokenising", text=tokenising(), primary="comm/rank0-work-timeout", absent=("comm/p2p-hang",)),
    WrittenLog(name="gloo-waits", text=gloo_waits(), primary="comm/timeout", line="Timed out waiting"),
    WrittenLog(name="docker-bridge", text=docker_bridge(), primary="comm/wrong-interface"),
    WrittenLog(name="version-mismatch", text=version_mismatch(), primary="version/rank-mismatch",
               absent=("launch/user-exception", "comm/wrong-interface")),
    WrittenLog(name="offload-bound", text=offload_bound(), primary="speed/offload-bound", line="time (ms)"),
    WrittenLog(name="slow-not-hung", text=slow_not_hung(), primary="hang/slow-not-hung",
               also=("launch/cancelled",)),
    WrittenLog(name="infiniband", text=infiniband(), primary="comm/ib-error", line="status=12"),
)  # fmt: skip
