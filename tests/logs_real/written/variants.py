# ruff: noqa: E501
"""The same troubles in other words: other launchers, older and newer releases, one line instead of many."""

from tests.logs_real.written.figures import megatron
from tests.logs_real.written.parts import (
    SITE,
    WrittenLog,
    bar,
    ds,
    falling,
    hf,
    launched,
    log,
    stopped,
    torchrun_failed,
    traceback,
    trainer,
)

BROADCAST = (
    f"{SITE}/torch/distributed/distributed_c10d.py",
    2421,
    "broadcast",
    "work = default_pg.broadcast([tensor], opts)",
)


def key(rank: int, error: str) -> str:
    return (
        f"[{rank}] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value store by key '0', "
        f"but store->get('0') got error: {error}. This may indicate a possible application crash on rank 0 or a network set up issue."
    )


def key_never_came() -> str:
    maps = [
        f"Map (num_proc=8):  {p}%|██        | {p * 900}/90000 [10:{p}<30:00, 52.1 examples/s]" for p in (20, 40, 60)
    ]
    failed = [
        line
        for rank in (1, 2, 3)
        for line in traceback("torch.distributed.DistBackendError", key(rank, "Timeout waiting for key: default_pg/0/0 after 600000 ms"),
                              BROADCAST, prefix=f"[rank{rank}]: ")
    ]  # fmt: skip
    return log(launched(gpus=4), maps, failed, torchrun_failed(1, rank=1, others=(0, 2, 3)))


def key_reset() -> str:
    """Rank 0 died in its data set, and the others only cannot reach its store any more."""
    own = traceback(
        "json.decoder.JSONDecodeError",
        "Expecting value: line 1 column 1 (char 0)",
        ("data.py", 21, "read", "return json.load(f)"),
        prefix="[rank0]: ",
    )
    others = traceback(
        "torch.distributed.DistBackendError", key(1, "Connection reset by peer"), BROADCAST, prefix="[rank1]: "
    )
    return log(launched(), own, others, torchrun_failed(1, rank=0, others=(1,)))


def nccl_failed(last: str, first: str = "unhandled system error (run with NCCL_DEBUG=INFO for details)") -> list[str]:
    message = f"""NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1970, {first}, NCCL version 2.20.5
ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.
Last error:
{last}"""
    return traceback("torch.distributed.DistBackendError", message, BROADCAST, prefix="[rank0]: ")


def nccl_shm() -> str:
    last = "Error while creating shared memory segment /dev/shm/nccl-hTdXfz (size 9637888), error: No space left on device (28)"
    return log(launched(gpus=8), nccl_failed(last), stopped(1))


def nccl_fallocate() -> str:
    return log(launched(gpus=8), nccl_failed("Call to posix_fallocate failed : No space left on device"), stopped(1))


def nccl_no_memory() -> str:
    return log(
        launched(gpus=8),
        nccl_failed("Cuda failure 2 'out of memory'", "unhandled cuda error (run with NCCL_DEBUG=INFO for details)"),
        stopped(1),
    )


def cublas() -> str:
    message = "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
    where = (f"{SITE}/torch/nn/modules/linear.py", 116, "forward", "return F.linear(input, self.weight, self.bias)")
    call = (f"{SITE}/torch/nn/modules/module.py", 1532, "_call_impl", "return forward_call(*args, **kwargs)")
    return log(trainer(falling(3)), traceback("RuntimeError", message, call, where))


def bf16_ones() -> str:
    """0.18.7 in bf16 without ZeRO: the wrapper says 1.0, reducing to 1.0."""
    skip = ds(
        "[deepspeed] fp16 dynamic loss scale overflow! Skipping step. Attempted loss scale: 1.0, reducing to 1.0",
        where="unfused_optimizer.py:231:step",
    )
    lines = [
        piece
        for s in range(1, 40)
        for piece in ([skip] if s in (9, 12, 30) else []) + [f"step {s}: loss {3 - s / 40:.3f}"]
    ]
    return log(launched(), lines)


def worker_killed() -> str:
    message = "DataLoader worker (pid 40312) is killed by signal: Killed. "
    where = (f"{SITE}/torch/utils/data/dataloader.py", 1145, "_try_get_data", "raise RuntimeError(")
    return log(
        trainer(falling(10)),
        traceback("RuntimeError", message, where, prefix="[rank0]: "),
        torchrun_failed(1, others=(1,)),
    )


def shell_killed() -> str:
    return log(
        "Loading checkpoint shards:  33%|███▎      | 2/6 [01:20<02:41, 40.3s/it]",
        "run.sh: line 12:  4242 Killed                  python train.py --deepspeed ds.json",
    )


def no_valid_checkpoint() -> str:
    where = (f"{SITE}/transformers/integrations/deepspeed.py", 450, "deepspeed_load_checkpoint", "raise ValueError(")
    return log(
        launched(), traceback("ValueError", "Can't find a valid checkpoint at out/checkpoint-500", where), stopped(1)
    )


def srun_ranks() -> str:
    """srun -l puts the rank in front of every line; rank 5 fails by itself."""
    steps = [f"0: step {s} | loss {3 - s / 30:.3f} | lr 1e-4" for s in range(1, 20)]
    own = traceback(
        "UnicodeDecodeError",
        "'utf-8' codec can't decode byte 0x92 in position 31: invalid start byte",
        ("corpus.py", 30, "__iter__", "for line in stream:"),
        prefix="5: ",
    )
    lost = [line for rank in (2, 3) for line in traceback(
        "RuntimeError", "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.1.0.5]:1991", BROADCAST, prefix=f"{rank}: ")]  # fmt: skip
    return log(
        steps, own, lost, "srun: error: node03: task 5: Exited with exit code 1", "srun: Terminating StepId=99.0"
    )


def rendezvous() -> str:
    where = (
        f"{SITE}/torch/distributed/elastic/rendezvous/dynamic_rendezvous.py",
        1188,
        "next_rendezvous",
        "raise RendezvousTimeoutError()",
    )
    return log("master_addr is only used for static rdzv_backend and when rdzv_endpoint is not specified.",
               traceback("torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError", "", where))  # fmt: skip


def cannot_connect() -> str:
    message = "The client socket has timed out after 60000ms while trying to connect to (10.0.0.5, 29500)."
    where = (f"{SITE}/torch/distributed/rendezvous.py", 189, "_create_c10d_store", "return TCPStore(")
    return log(traceback("torch.distributed.DistNetworkError", message, where))


def attention() -> str:
    where = (f"{SITE}/flash_attn/flash_attn_interface.py", 90, "_flash_attn_forward", "out = flash_attn_gpu.fwd(")
    return log(
        launched(), traceback("RuntimeError", "FlashAttention only support fp16 and bf16 data type", where), stopped(1)
    )


def lightning_nan() -> str:
    """The loss is only in the progress bar."""
    lines = [
        f"Epoch 0: {s}%|{'█' * (s // 10):<10}| {s}/100 [00:{s % 60:02d}<01:02, 1.58it/s, loss={3 - s / 60:.3f}, v_num=3]"
        for s in range(1, 60)
    ]
    lines += [
        f"Epoch 0: {s}%|{'█' * (s // 10):<10}| {s}/100 [00:{s % 60:02d}<01:02, 1.58it/s, loss=nan, v_num=3]"
        for s in range(60, 80)
    ]
    return log("Using bfloat16 Automatic Mixed Precision (AMP)", "\r".join(lines))


def interrupted_in_barrier() -> str:
    """No watchdog: the user gave up. NCCL had connected the GPUs peer to peer."""
    nccl = [
        f"ws:{4100 + r}:{4150 + r} [{r}] NCCL INFO Channel 00/0 : {r}[{r}] -> {1 - r}[{1 - r}] via P2P/CUMEM"
        for r in range(2)
    ]
    where = (f"{SITE}/torch/distributed/distributed_c10d.py", 3703, "barrier", "work.wait()")
    return log(launched(), nccl, "ws:4100:4150 [0] NCCL INFO comm 0x5 rank 0 nranks 2 cudaDev 0 - Init COMPLETE", ["^C"],
               traceback("KeyboardInterrupt", "", where, prefix="[rank0]: "))  # fmt: skip


def megatron_bf16() -> str:
    """bf16 prints a loss scale of 1.0 for ever, and that is no collapse."""
    return log("  bf16 ............ True", [megatron(s, f"{9 - s / 400:.5f}", 1.0, 0) for s in range(10, 900, 10)])


def equal_rewards() -> str:
    lines = [
        f"{{'loss': 0.0, 'grad_norm': 0.0, 'learning_rate': 1e-06, 'reward': 1.0, 'reward_std': 0.0, 'kl': 0.0, 'epoch': {s / 100}}}"
        for s in range(30)
    ]
    return log("bf16=True", lines)


def advice_of_watchdog() -> str:
    """A rank that was slow once: the heartbeat monitor warns, and training goes on."""
    warning = "[rank3]:[W511 10:20:00.118 ProcessGroupNCCL.cpp:1484] [PG ID 0 Rank 3] ProcessGroupNCCL's watchdog got stuck for 480 seconds without making progress in monitoring enqueued collectives."
    return log(trainer(falling(30)), warning, trainer(falling(30), first=31), "{'train_runtime': 99.1, 'epoch': 1.0}")


def gas_bar() -> str:
    """An evaluation in between, with a bar of its own, and nan in a metric that is not the loss."""
    evaluation = [bar(s, 20, title="Evaluating") for s in range(1, 21)]
    return log(
        trainer(falling(30)),
        evaluation,
        "{'eval_loss': 1.8, 'eval_rouge': nan, 'eval_runtime': 9.1}",
        hf(31, 1.39),
        trainer(falling(9), first=32),
    )


CASES = (
    WrittenLog(name="key-never-came", text=key_never_came(), primary="comm/rank0-work-timeout", absent=("launch/user-exception",)),
    WrittenLog(name="key-reset", text=key_reset(), primary="launch/user-exception", also=("launch/peer-failure",), line="JSONDecodeError"),
    WrittenLog(name="nccl-shm", text=nccl_shm(), primary="memory/shm-exhausted", absent=("disk/full",)),
    WrittenLog(name="nccl-fallocate", text=nccl_fallocate(), primary="memory/shm-exhausted", absent=("disk/full",)),
    WrittenLog(name="nccl-no-memory", text=nccl_no_memory(), primary="memory/gpu-oom-init"),
    WrittenLog(name="cublas", text=cublas(), primary="memory/gpu-oom-step"),
    WrittenLog(name="bf16-ones", text=bf16_ones(), primary="numerics/nan-loss", absent=("loss-scale/collapse", "loss-scale/static"), line="1.0, reducing to 1.0"),
    WrittenLog(name="worker-killed", text=worker_killed(), primary="memory/host-oom-kill"),
    WrittenLog(name="shell-killed", text=shell_killed(), primary="memory/host-oom-kill", line="Killed"),
    WrittenLog(name="no-valid-checkpoint", text=no_valid_checkpoint(), primary="checkpoint/missing-shards"),
    WrittenLog(name="srun-ranks", text=srun_ranks(), primary="launch/user-exception", also=("launch/peer-failure",), line="UnicodeDecodeError"),
    WrittenLog(name="rendezvous", text=rendezvous(), primary="comm/missing-rank", accept=("comm/unreachable",)),
    WrittenLog(name="cannot-connect", text=cannot_connect(), primary="comm/unreachable"),
    WrittenLog(name="attention", text=attention(), primary="autograd/attention-dtype"),
    WrittenLog(name="lightning-nan", text=lightning_nan(), primary="numerics/nan-loss", line="loss=nan"),
    WrittenLog(name="interrupted-in-barrier", text=interrupted_in_barrier(), primary="comm/p2p-hang", also=("launch/cancelled",)),
    WrittenLog(name="megatron-bf16", text=megatron_bf16(), primary=None),
    WrittenLog(name="equal-rewards", text=equal_rewards(), primary=None),
    WrittenLog(name="watchdog-advice", text=advice_of_watchdog(), primary=None),
    WrittenLog(name="evaluation-between", text=gas_bar(), primary=None),
)  # fmt: skip
