# ruff: noqa: E501
"""Short excerpts as people paste them (cut, prefixed, only a summary), about devices, memory, partitioned weights and backward passes."""

from tests.logs_real.written.parts import (
    SITE,
    WrittenLog,
    bar,
    behind,
    ds,
    falling,
    log,
    stopped,
    torchrun_failed,
    traceback,
    trainer,
    watchdog,
)

NCCL = "NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1691, unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.19.3"
BARRIER = (f"{SITE}/torch/distributed/distributed_c10d.py", 3703, "barrier", "work = default_pg.barrier(opts=opts)")


CASES = (
    WrittenLog(
        name="ray-illegal",
        text=log(
            *[
                f"(RayWorkerVllm pid=7046) {line}"
                for line in [
                    "[E ProcessGroupNCCL.cpp:916] [Rank 0] NCCL watchdog thread terminated with exception: CUDA error: an illegal memory access was encountered",
                    "CUDA kernel errors might be asynchronously reported at some other API",
                    "terminate called after throwing an instance of 'std::runtime_error'",
                    "Fatal Python error: Aborted",
                ]
            ]
        ),
        primary="cuda/illegal-access",
        absent=("launch/abort",),
    ),
    WrittenLog(
        name="what-only",
        text=log(
            "terminate called after throwing an instance of 'c10::Error'",
            "  what():  CUDA error: device-side assert triggered",
            "CUDA kernel errors might be asynchronously reported at some other API call",
        ),
        primary="cuda/device-assert",
        absent=("launch/abort",),
    ),
    WrittenLog(
        name="two-kills",
        text=log(
            "[2024-02-12 12:43:36,145] torch.distributed.elastic.multiprocessing.api: [ERROR] failed (exitcode: -9) local_rank: 1 (pid: 424473) of binary: /opt/env/bin/python"
        ),
        primary="memory/host-oom-kill",
        accept=("launch/killed",),
    ),
    WrittenLog(
        name="deepseek-moe",
        text=log(
            '  "n_routed_experts": 64,',
            ds("Creating torch.bfloat16 ZeRO stage 3 optimizer"),
            [bar(1, 300)],
            [watchdog(r, 977, "ALLGATHER", numel=99) for r in range(4)],
        ),
        primary="zero3/moe-hang",
    ),
    WrittenLog(
        name="index0",
        text=log(
            ds("Creating torch.bfloat16 ZeRO stage 3 optimizer"),
            traceback(
                "IndexError",
                "index 1 is out of bounds for dimension 0 with size 0",
                ("m.py", 4, "init", "w = model.lm_head.weight[1]"),
                prefix="[rank0]: ",
            ),
            stopped(1),
        ),
        primary="zero3/empty-weights-in-model",
    ),
    WrittenLog(
        name="addmm",
        text=log(
            "zero_optimization_stage ...... 3",
            traceback(
                "RuntimeError",
                "mat1 and mat2 shapes cannot be multiplied (512x4096 and 0x4096)",
                ("t.py", 5, "f", "F.linear(h, model.lm_head.weight)"),
                prefix="[rank1]: ",
            ),
        ),
        primary="zero3/empty-weights-in-model",
    ),
    WrittenLog(
        name="no-grad-ds",
        text=log(
            "/x/torch/utils/checkpoint.py:91: UserWarning: None of the inputs have requires_grad=True. Gradients will be None",
            traceback(
                "AssertionError",
                "loss must be a scalar tensor with grad_fn",
                (f"{SITE}/deepspeed/runtime/engine.py", 3400, "backward", "assert maybe_loss_for_backward(loss), ("),
            ),
            stopped(1),
        ),
        primary="autograd/no-grad",
        accept=("launch/user-exception",),
    ),
    WrittenLog(
        name="ecc",
        text=behind(
            "2024-07-24T08:45:13.616Z ",
            log(
                traceback(
                    "RuntimeError",
                    "CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1",
                    (f"{SITE}/torch/cuda/__init__.py", 1, "set_device", "torch._C._cuda_setDevice(device)"),
                    prefix="[rank6]: ",
                )
            ),
        ),
        primary="hardware/gpu-fault",
    ),
    WrittenLog(
        name="xid-dmesg",
        text=log(
            trainer(falling(9)),
            "kernel: NVRM: GPU at PCI:0000:3b:00: GPU-12",
            "kernel: NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, name=python, GPU has fallen off the bus.",
            [watchdog(r, 31, "ALLREDUCE", numel=9) for r in (0, 1)],
            torchrun_failed(-6, rank=0, others=(1,), name="SIGABRT"),
        ),
        primary="hardware/gpu-fault",
        absent=("comm/timeout", "launch/abort"),
    ),
    WrittenLog(
        name="xid31",
        text=log(
            trainer(falling(9)),
            "kernel: NVRM: Xid (PCI:0000:3b:00): 31, pid=1234, name=python, Ch 00000008, intr 00000000. MMU Fault",
            traceback(
                "RuntimeError",
                "CUDA error: an illegal memory access was encountered",
                ("t.py", 1, "x", "y.item()"),
                prefix="[rank0]: ",
            ),
            torchrun_failed(1),
        ),
        primary="cuda/illegal-access",
        absent=("hardware/gpu-fault",),
    ),
    WrittenLog(
        name="assert-cut",
        text=log(
            "../aten/src/ATen/native/cuda/Loss.cu:242: nll_loss_forward_reduce_cuda_kernel_2d: block: [0,0,0], thread: [4,0,0] Assertion `t >= 0 && t < n_classes` failed."
        ),
        primary="cuda/device-assert",
    ),
    WrittenLog(
        name="assert-new",
        text=log(
            "/pytorch/aten/src/ATen/native/cuda/Indexing.cu:1553: indexSelectLargeIndex: block: [12,0,0], thread: [64,0,0] Assertion `srcIndex < srcSelectDimSize` failed.",
            traceback(
                "torch.AcceleratorError",
                "CUDA error: device-side assert triggered",
                ("t.py", 1, "x", "y.item()"),
                prefix="[rank0]: ",
            ),
        ),
        primary="cuda/device-assert",
    ),
    WrittenLog(
        name="ckpt-cut",
        text=log(
            "[rank0]: torch.utils.checkpoint.CheckpointError: torch.utils.checkpoint: Recomputed values for the following tensors have different metadata than during the forward pass.",
            "[rank0]: tensor at position 4:",
            "[rank0]: saved metadata: {'shape': torch.Size([4096]), 'dtype': torch.bfloat16}",
            "[rank0]: recomputed metadata: {'shape': torch.Size([0]), 'dtype': torch.bfloat16}",
        ),
        primary="autograd/recompute-mismatch",
    ),
    WrittenLog(
        name="ds-tensor",
        text=log(
            traceback(
                "AttributeError",
                "'Parameter' object has no attribute 'ds_tensor'",
                (f"{SITE}/transformers/modeling_utils.py", 1, "resize", "deepspeed.zero.GatheredParameters"),
                prefix="[rank0]: ",
            )
        ),
        primary="zero3/tied-or-resized",
    ),
    WrittenLog(
        name="expected-released",
        text=log(
            traceback(
                "RuntimeError",
                "tracing error at step 412: ",
                (
                    f"{SITE}/deepspeed/runtime/zero/partitioned_param_coordinator.py",
                    1,
                    "fetch_sub_module",
                    "raise RuntimeError(",
                ),
                prefix="[rank0]: ",
            )
        ),
        primary="zero3/inflight-params",
    ),
    WrittenLog(
        name="gen-gloo",
        text=log(
            ds("Creating torch.bfloat16 ZeRO stage 3 optimizer"),
            traceback(
                "RuntimeError",
                "[x/unbound_buffer.cc:78] Timed out waiting 6000ms for recv operation to complete",
                (f"{SITE}/transformers/generation/utils.py", 2215, "generate", "result = self._sample("),
                (f"{SITE}/deepspeed/runtime/zero/partitioned_param_coordinator.py", 1, "fetch_sub_module", "x"),
                prefix="[rank1]: ",
            ),
            torchrun_failed(1, rank=1, others=(0,)),
        ),
        primary="zero3/generate-hang",
    ),
    WrittenLog(
        name="shm-warn",
        text=log(
            "c1:1:9 [0] include/shm.h:48 NCCL WARN Error while creating shared memory segment nccl-shm-recv-1 (size 4194660)",
            "c1:1:9 [0] NCCL INFO x.cc -> 2",
            traceback("RuntimeError", NCCL, BARRIER),
        ),
        primary="memory/shm-exhausted",
        absent=("comm/nccl-error", "launch/user-exception"),
    ),
    WrittenLog(
        name="fallocate-warn",
        text=log(
            "c1:1:9 [0] misc/shmutils.cc:72 NCCL WARN Call to posix_fallocate failed : No space left on device",
            traceback("torch.distributed.DistBackendError", NCCL, BARRIER, prefix="[rank0]: "),
            stopped(1),
        ),
        primary="memory/shm-exhausted",
        absent=("comm/nccl-error",),
    ),
    WrittenLog(
        name="task-killed",
        text=log(
            [f"{r}: step {s} loss 2.{s}" for s in range(4) for r in range(4)],
            "srun: error: gpu3: task 2: Killed",
            "srun: Terminating StepId=4.0",
            "slurmstepd: error: *** STEP 4.0 ON gpu3 CANCELLED AT 2024-05-11T10:20:12 ***",
            traceback(
                "torch.distributed.DistBackendError", "NCCL communicator was aborted on rank 0.", BARRIER, prefix="0: "
            ),
        ),
        primary="memory/host-oom-kill",
        accept=("launch/killed",),
        absent=("launch/cancelled",),
    ),
)
