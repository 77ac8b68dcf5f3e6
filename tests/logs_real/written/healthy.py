# ruff: noqa: E501
"""Logs of runs that are well, with everything in them that looks like trouble."""

from tests.logs_real.written.figures import megatron
from tests.logs_real.written.parts import (
    SITE,
    WrittenLog,
    bar,
    ds,
    falling,
    finished,
    hf,
    launched,
    log,
    overflow,
    traceback,
    trainer,
)

END = "{'train_runtime': 812.4, 'train_samples_per_second': 12.1, 'train_loss': 1.61, 'epoch': 1.0}"


def warmup() -> str:
    falls = [overflow(65536), *(overflow(2**p, 2 ** (p - 1)) for p in (16, 15, 14))]
    first = [piece for i, line in enumerate(falls) for piece in (line, bar(i + 1, 500))]
    return log(launched(), first, trainer(falling(200), first=5), END, finished())


def quoted_traceback() -> str:
    """A model of code: its samples and answers hold tracebacks and words of failure."""
    sample = [
        "Sample 0 decoded:",
        "<|user|> why does my script stop?",
        *traceback("torch.cuda.OutOfMemoryError", "CUDA out of memory. Tried to allocate 20.00 MiB"),
        "<|assistant|> Your GPU is full. Also look for `exits with return code = -9` and NCCL timeouts.",
    ]
    return log(launched(), sample, trainer(falling(60)), END, finished())


def advice() -> str:
    lines = """
    /opt/conda/lib/python3.10/site-packages/transformers/training_args.py:1525: FutureWarning: `evaluation_strategy` is deprecated and will be removed
    If you see OVERFLOW in every step, try a lower learning rate. To debug a CUDA out of memory error see the docs.
    WARNING: if training hangs set NCCL_P2P_DISABLE=1; watchdog timeouts can be raised with ddp_timeout.
    [WARNING]  async_io requires the dev libaio .so object and headers but these were not found.
    [WARNING]  sparse_attn requires a torch version >= 1.5 and < 2.0 but detected 2.3
    [WARNING]  using untested triton version (2.3.1), only 1.0.0 is known to be compatible
    You are attempting to use Flash Attention 2.0 without specifying a torch dtype. This might lead to unexpected behaviour
    `use_cache=True` is incompatible with gradient checkpointing. Setting `use_cache=False`.
    """
    return log(launched(), lines, trainer(falling(40)), END, finished())


def retried() -> str:
    """A download fails twice and then works; a data-loader worker is replaced."""
    lines = [
        "'(ReadTimeoutError(\"HTTPSConnectionPool(host='cdn-lfs.huggingface.co', port=443): Read timed out.\"))' thrown while requesting GET https://x",
        "Retrying in 1s [Retry 1/5].",
        *traceback("ConnectionResetError", "[Errno 104] Connection reset by peer", ("fetch.py", 10, "get", "read()")),
        "retrying (2 of 5)",
    ]
    return log(lines, trainer(falling(60)), END)


def saves() -> str:
    lines = """
    [INFO|trainer.py:3411] 2024-05-11 10:10:00,118 >> Saving model checkpoint to out/checkpoint-50
    [2024-05-11 10:10:02,118] [INFO] [logging.py:96:log_dist] [Rank 0] [Torch] Checkpoint global_step50 is about to be saved!
    [2024-05-11 10:10:04,118] [INFO] [torch_checkpoint_engine.py:21:save] [Torch] Saving out/checkpoint-50/global_step50/zero_pp_rank_0_mp_rank_00_optim_states.pt...
    [2024-05-11 10:10:14,118] [INFO] [torch_checkpoint_engine.py:33:commit] [Torch] Checkpoint global_step50 is ready now!
    Deleting older checkpoint [out/checkpoint-25] due to args.save_total_limit
    """
    return log(launched(), trainer(falling(50)), lines, trainer(falling(50), first=51), lines, END, finished())


def nccl_info() -> str:
    lines = [
        "gpu01:88:88 [0] NCCL INFO Bootstrap : Using eth0:10.0.0.4<0>",
        "gpu01:88:88 [0] NCCL INFO NET/Plugin : Plugin load (libnccl-net.so) returned 2 : libnccl-net.so: cannot open shared object file: No such file or directory",
        "gpu01:88:140 [0] NCCL INFO NET/IB : No device found.",
        "gpu01:88:140 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.4<0> [1]docker0:172.17.0.1<0>",
        "gpu01:88:140 [0] NCCL INFO comm 0x55 rank 0 nranks 8 cudaDev 0 busId 7000 - Init COMPLETE",
        "[rank0]:[W511 10:00:01.118 ProcessGroupNCCL.cpp:4115] [PG ID 0 PG GUID 0 Rank 0]  using GPU 0 to perform barrier as devices used by this process are currently unknown. This can potentially cause a hang if this rank to GPU mapping is incorrect.",
    ]
    end = [
        "[rank0]:[W511 10:30:01.118 ProcessGroupNCCL.cpp:1250] Warning: WARNING: process group has NOT been destroyed before we destruct ProcessGroupNCCL.",
        "gpu01:88:141 [0] NCCL INFO [Service thread] Connection closed by localRank 0",
        "gpu01:88:88 [0] NCCL INFO comm 0x55 rank 0 nranks 8 cudaDev 0 busId 7000 - Abort COMPLETE",
    ]
    return log(lines, trainer(falling(60)), END, end)


def megatron_healthy() -> str:
    """A probe of a larger scale every thousand iterations; it grows, one iteration is skipped, it comes back."""
    lines = []
    for step in range(100, 8100, 100):
        probe = step % 1000 == 0
        lines.append(megatron(step, f"{10.4 - step / 1500:.6f}", 131072.0, 1 if probe else 0))
    return log("  fp16 ................... True", "  loss_scale_window .......... 1000", lines)


def lightning() -> str:
    lines = [
        f"Epoch 0: {s}%|{'█' * (s // 10):<10}| {s}/100 [00:{s % 60:02d}<01:02, 1.58it/s, v_num=3, train_loss={3 - s / 60:.3f}, train_acc=0.{s:03d}]"
        for s in range(1, 101)
    ]
    return log("GPU available: True (cuda), used: True", "Using bfloat16 Automatic Mixed Precision (AMP)",
               "You are using a CUDA device ('NVIDIA A100-SXM4-80GB') that has Tensor Cores. To properly utilize them, you should set `torch.set_float32_matmul_precision('medium' | 'high')`",
               "\r".join(lines), "`Trainer.fit` stopped: `max_epochs=1` reached.")  # fmt: skip


def accelerate() -> str:
    lines = [
        f"05/11/2024 10:{s // 60:02d}:{s % 60:02d} - INFO - __main__ - step {s}: loss = {3.2 - s / 300:.4f}, lr = 2e-05"
        for s in range(1, 400, 5)
    ]
    return log("05/11/2024 10:00:00 - INFO - __main__ - Distributed environment: DEEPSPEED  Backend: nccl", "Mixed precision type: bf16",
               lines, "05/11/2024 10:59:00 - INFO - __main__ - epoch 0: eval loss nan perplexity nan (empty split)")  # fmt: skip


def sampled_norm() -> str:
    """fp16: the Trainer prints a grad norm of inf or nan for the steps that its scaler skips; the loss is fine."""
    norms: list[float | str] = ["inf", "inf", "nan", *[round(1.1 + i % 7 / 10, 3) for i in range(57)]]
    return log(
        "fp16=True",
        [overflow(65536), overflow(65536, 32768), overflow(32768, 16384)],
        trainer(falling(60), norms=norms),
        END,
    )


def edge_riding() -> str:
    lines = []
    for step in range(1, 420):
        if step > 5 and step % 103 == 0:
            lines.append(overflow(131072, second=step))
        elif step > 5 and step % 103 == 1:
            lines.append(overflow(131072, 65536, second=step))
        lines += [bar(step, 420), hf(step, round(2.5 - step / 300, 4))] if step % 10 == 0 else [bar(step, 420)]
    return log('"fp16": {"enabled": true, "loss_scale_window": 100},', lines, END)


def destructors() -> str:
    end = [
        "Exception ignored in: <function _MultiProcessingDataLoaderIter.__del__ at 0x7f>",
        *traceback(
            "AssertionError",
            "can only test a child process",
            (f"{SITE}/torch/utils/data/dataloader.py", 1620, "__del__", "self._shutdown_workers()"),
        ),
    ]
    return log(launched(), trainer(falling(40)), END, end, finished())


def small_loss_at_zero() -> str:
    """A reward model learns its pairs by heart: single losses are 0.0 and the norm is small but alive."""
    losses: list[float | str] = [*falling(30, 0.7, 0.05), *[0.0 if i % 4 == 0 else 0.0001 for i in range(20)]]
    norms: list[float | str] = [round(2 - i / 40, 4) for i in range(50)]
    return log("bf16=True", trainer(losses, norms=norms), END)


def resumed() -> str:
    """A run goes on after one that was cancelled, in the same file."""
    before = [
        "slurmstepd: error: *** JOB 7 ON node042 CANCELLED AT 2024-05-11T22:00:12 DUE TO PREEMPTION ***",
        "requeued, resuming from out/checkpoint-40",
    ]
    return log(launched(), trainer(falling(40)), before, trainer(falling(60), first=41), END, finished())


def slow_big_batch() -> str:
    lines = [piece for s in range(300, 340) for piece in (bar(s, 2724, speed="132.87s/it"), hf(s, 1.66))]
    return log(launched(), lines)


def evaluation_slow() -> str:
    """A first build takes its time, then all is well."""
    build = """
    Using /root/.cache/torch_extensions/py310_cu121 as PyTorch extensions root...
    Detected CUDA files, patching ldflags
    Emitting ninja build file /root/.cache/torch_extensions/py310_cu121/fused_adam/build.ninja...
    Building extension module fused_adam...
    [1/3] /usr/local/cuda/bin/nvcc -c multi_tensor_adam.cu -o multi_tensor_adam.cuda.o
    [2/3] c++ -c fused_adam_frontend.cpp -o fused_adam_frontend.o
    [3/3] c++ fused_adam_frontend.o multi_tensor_adam.cuda.o -shared -o fused_adam.so
    Loading extension module fused_adam...
    Time to load fused_adam op: 41.1 seconds
    """
    return log(launched(), build, trainer(falling(40)), "{'eval_loss': 1.93, 'eval_runtime': 44.1, 'epoch': 0.1}",
               trainer(falling(20), first=41), END, finished())  # fmt: skip


def timers() -> str:
    """wall_clock_breakdown without offloading: the step is short."""
    lines = [
        piece
        for s in range(1, 30)
        for piece in (
            "[Rank 0] time (ms) | fwd_microstep: 176.60 | bwd_microstep: 364.56 | step_microstep: 80.87",
            "[Rank 0] time (ms) | fwd: 176.60 | bwd: 364.56 | bwd_inner: 306.87 | bwd_allreduce: 57.62 | step: 80.87",
            ds(
                f"epoch=0/micro_step={s}/global_step={s}, RunningAvgSamplesPerSec=12.2, CurrSamplesPerSec=12.5, MemAllocated=4.34GB, MaxMemAllocated=22.1GB"
            ),
        )
    ]
    return log(launched(), lines, finished())


CASES = tuple(
    WrittenLog(name=name, text=text, primary=None, also=also)
    for name, text, also in (
        ("warmup", warmup(), ("loss-scale/warmup",)),
        ("quoted-traceback", quoted_traceback(), ()),
        ("advice", advice(), ()),
        ("retried", retried(), ()),
        ("saves", saves(), ()),
        ("nccl-info", nccl_info(), ()),
        ("megatron-healthy", megatron_healthy(), ()),
        ("lightning", lightning(), ()),
        ("accelerate", accelerate(), ()),
        ("norm-of-skipped-steps", sampled_norm(), ("loss-scale/warmup",)),
        ("edge-riding", edge_riding(), ("loss-scale/periodic",)),
        ("destructors", destructors(), ()),
        ("single-zeros", small_loss_at_zero(), ()),
        ("resumed", resumed(), ()),
        ("slow-big-batch", slow_big_batch(), ()),
        ("first-build", evaluation_slow(), ()),
        ("timers", timers(), ()),
    )
)
