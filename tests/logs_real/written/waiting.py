# ruff: noqa: E501
"""Logs about ranks that wait: watchdogs of several releases, networks, rendezvous, and who it was that did not come."""

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
ZERO3 = ds("Creating torch.bfloat16 ZeRO stage 3 optimizer")


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
    WrittenLog(name="moe-of-qwen", text=moe_of_qwen(), primary="zero3/moe-hang", absent=("comm/timeout", "launch/abort", "zero3/branch-hang")),
    WrittenLog(name="generate-in-stacks", text=generate_in_stacks(), primary="zero3/generate-hang", absent=("comm/timeout", "launch/abort")),
    WrittenLog(name="one-rank-out-of-memory", text=one_rank_out_of_memory(), primary="memory/gpu-oom-step", absent=("comm/timeout", "launch/abort"), also=("launch/peer-failure",)),
)  # fmt: skip
