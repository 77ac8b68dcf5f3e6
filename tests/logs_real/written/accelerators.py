# ruff: noqa: E501
"""Logs of other accelerators than NVIDIA's, and of what NCCL's library alone says before a process aborts."""

from tests.logs_real.written.parts import SITE, WrittenLog, falling, log, stopped, torchrun_failed, traceback, trainer

STEP = (f"{SITE}/transformers/trainer.py", 2388, "_inner_training_loop", "tr_loss_step = self.training_step(model)")
SYSTEM = """NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:317, unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.21.5
ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.
Last error:
"""


def hccl_watchdog() -> str:
    """Ascend's collectives print NCCL's lines under their own name."""
    late = "Watchdog caught collective operation timeout: WorkHCCL(SeqNum=196, OpType=ALLREDUCE, Timeout(ms)=3600000) ran for 3600185 milliseconds before timing out."
    ended = f"[Rank 1] HCCL watchdog thread terminated with exception: [Rank 1] {late}"
    return log(
        trainer(falling(12)),
        [f"[rank{r}]:[E324 13:00:25.4280{r} compiler_depend.ts:574] [Rank {r}] {late}" for r in (1, 0)],
        "[rank1]:[E324 13:00:25.4281 compiler_depend.ts:628] Some HCCL operations have failed or timed out. Due to the asynchronous nature of ASCEND kernels, subsequent NPU operations might run on corrupted/incomplete data.",
        f"[rank1]:[E324 13:00:25.4293 compiler_depend.ts:1020] {ended}",
        "terminate called after throwing an instance of 'std::runtime_error'",
        f"  what():  {ended}",
    )


def infiniband_in_the_abort() -> str:
    """No Python exception: NCCL's warning, and the abort that repeats it over several lines."""
    said = "NET/IB : Got completion from peer 10.2.9.8<48598> with error 12, opcode 0, len 0, vendor err 129"
    return log(
        f"node36:24141:24296 [2] ib_plugin.c:978 NCCL WARN {said}",
        "node36:24141:24296 [2] NCCL INFO include/net.h:35 -> 2",
        "[E ProcessGroupNCCL.cpp:456] Some NCCL operations have failed or timed out. Due to the asynchronous nature of CUDA kernels, subsequent GPU operations might run on corrupted/incomplete data.",
        "terminate called after throwing an instance of 'std::runtime_error'",
        "  what():  NCCL error: unhandled system error, NCCL version 2.14.3",
        "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error. ",
        "Last error:",
        said,
    )


def flushed_after_a_kill() -> str:
    """Status 5 only says that the connection had gone; here a process was killed before."""
    said = "NET/IB : Got completion from peer 10.2.0.7<38222> with status=5 opcode=0 len=0 vendor err 249 (Recv)"
    lost = f"NCCL error in: NCCLUtils.hpp:268, remote process exited or there was a network error, NCCL version 2.21.5\nncclRemoteError: A call failed.\nLast error:\n{said}"
    where = ("train.py", 12, "main", "dist.barrier()")
    return log(
        trainer(falling(9)),
        "node07: run.sh: line 3: 991 Killed                  python -u train.py",
        f"node08:812:911 [1] transport/net_ib.cc:1298 NCCL WARN {said}",
        traceback("torch.distributed.DistBackendError", lost, where, prefix="[rank9]: "),
    )


def full(text: str, kind: str = "RuntimeError") -> str:
    return log(trainer(falling(4)), traceback(kind, text, STEP, prefix="[rank3]: "), torchrun_failed(1, rank=3))


def cannot_assign() -> str:
    """An address of a link alone: connecting fails in other words than refused or timed out."""
    last = (
        "socketStartConnect: Connect to fe80::e4d2:1aff:fe3b:2c%veth31<43123> failed : Cannot assign requested address"
    )
    where = ("train.py", 12, "main", "dist.barrier()")
    return log(traceback("torch.distributed.DistBackendError", SYSTEM + last, where, prefix="[rank1]: "), stopped(1))


CASES = (
    WrittenLog(name="hccl-watchdog", text=hccl_watchdog(), primary="comm/timeout", absent=("launch/abort",)),
    WrittenLog(
        name="infiniband-in-the-abort",
        text=infiniband_in_the_abort(),
        primary="comm/ib-error",
        absent=("launch/abort", "comm/nccl-error"),
        line="error 12",
    ),
    WrittenLog(
        name="nccl-error-in-the-abort",
        text=log(
            trainer(falling(4)),
            "terminate called after throwing an instance of 'std::runtime_error'",
            "  what():  NCCL error: unhandled system error, NCCL version 2.14.3",
        ),
        primary="comm/nccl-error",
        absent=("launch/abort",),
    ),
    WrittenLog(
        name="flushed-after-a-kill",
        text=flushed_after_a_kill(),
        primary="memory/host-oom-kill",
        also=("launch/peer-failure",),
        line="Killed",
    ),
    WrittenLog(
        name="hip-memory",
        text=full(
            "HIP out of memory. Tried to allocate 2.02 GiB. GPU 3 has a total capacity of 63.98 GiB of which 1.11 GiB is free.",
            "torch.OutOfMemoryError",
        ),
        primary="memory/gpu-oom-step",
    ),
    WrittenLog(
        name="npu-memory",
        text=full(
            "NPU out of memory. Tried to allocate 2.00 GiB (NPU 5; 60.97 GiB total capacity; 55.64 GiB already allocated; 1.10 GiB free)"
        ),
        primary="memory/gpu-oom-step",
    ),
    WrittenLog(
        name="hip-address",
        text=full(
            "HIP error: an illegal memory access was encountered\nFor debugging consider passing AMD_SERIALIZE_KERNEL=3",
            "torch.AcceleratorError",
        ),
        primary="cuda/illegal-access",
        absent=("launch/user-exception",),
    ),
    WrittenLog(
        name="cannot-assign-address",
        text=cannot_assign(),
        primary="comm/unreachable",
        accept=("comm/wrong-interface",),
        absent=("comm/nccl-error",),
    ),
)
