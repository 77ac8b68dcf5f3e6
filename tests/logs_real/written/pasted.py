# ruff: noqa: E501
"""What people paste: the last lines of a traceback without its head, its last line alone, a cell of a notebook.

Beside them what looks alike and is none: an exception that the script caught and printed.
"""

from tests.logs_real.written.parts import SITE, WrittenLog, falling, frame, log, stopped, torchrun_failed, trainer

OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 9.28 GiB. GPU 2 has a total capacity of 79.33 GiB of which 5.10 GiB is free."
DONE = "{'train_runtime': 812.4, 'train_samples_per_second': 12.1, 'train_loss': 1.61, 'epoch': 1.0}"
STAGE_2 = f"{SITE}/deepspeed/runtime/zero/stage_1_and_2.py"


def notebook() -> str:
    return log(
        """
        Using /home/u/.cache/torch_extensions as PyTorch extensions root...
        Building extension module cpu_adam...
        ---------------------------------------------------------------------------
        CalledProcessError                        Traceback (most recent call last)
        ~/.local/lib/python3.8/site-packages/torch/utils/cpp_extension.py in _run_ninja_build(build_directory, verbose)
           1672             check=True,
        -> 1673             env=env)
        CalledProcessError: Command '['ninja', '-v']' returned non-zero exit status 1.

        The above exception was the direct cause of the following exception:

        RuntimeError                              Traceback (most recent call last)
        <ipython-input-12-4f> in <module>
        ----> 1 trainer.train()
        RuntimeError: Error building extension 'cpu_adam'
        """
    )


def headless(said: str, *frames: tuple[str, int, str, str], prefix: str = "") -> str:
    """The frames and the last line of a traceback."""
    return log([f"{prefix}{line}" for one in frames for line in frame(*one).splitlines()], f"{prefix}{said}")


CASES = (
    WrittenLog(
        name="pasted-batch-assertion",
        text=log(
            "AssertionError: Check batch related parameters. train_batch_size is not equal to micro_batch_per_gpu * gradient_acc_step * world_size 256 != 4 * 8 * 6"
        ),
        primary="config/batch-size",
        line="256 != 4 * 8 * 6",
    ),
    WrittenLog(
        name="pasted-mismatch-wrapped",
        text=log(
            """
            ValueError: Please correct the following DeepSpeed config values that mismatch
            TrainingArguments values:
            - ds gradient_accumulation_steps=4 vs hf gradient_accumulation_steps=2
            The easiest method is to set these DeepSpeed config values to 'auto'.
            """
        ),
        primary="config/hf-mismatch",
    ),
    WrittenLog(
        name="pasted-auto-refused",
        text=log(
            """
            pydantic_core._pydantic_core.ValidationError: 1 validation error for DeepSpeedZeroConfig
            reduce_bucket_size
              Input should be a valid integer, unable to parse string as an integer [type=int_parsing, input_value='auto', input_type=str]
                For further information visit https://errors.pydantic.dev/2.9/v/int_parsing
            """
        ),
        primary="config/auto-unresolved",
        absent=("config/wrong-type",),
    ),
    WrittenLog(
        name="pasted-extra-key",
        text=log(
            """
            pydantic_core._pydantic_core.ValidationError: 1 validation error for DeepSpeedZeroConfig
            stage3_gather_fp16_weights
              Extra inputs are not permitted [type=extra_forbidden, input_value=True, input_type=bool]
            """
        ),
        primary="config/unknown-key",
    ),
    WrittenLog(
        name="pasted-memory-in-forward",
        text=headless(
            OOM,
            (f"{SITE}/transformers/models/qwen2/modeling_qwen2.py", 1164, "forward", "logits = logits.float()"),
            prefix="[rank2]: ",
        ),
        primary="memory/gpu-oom-step",
        absent=("memory/gpu-oom-init",),
    ),
    WrittenLog(
        name="pasted-memory-for-states",
        text=headless(
            OOM,
            (STAGE_2, 506, "__init__", "self.initialize_optimizer_states()"),
            (STAGE_2, 651, "initialize_optimizer_states", "self.optimizer.step()"),
        ),
        primary="memory/gpu-oom-init",
    ),
    WrittenLog(
        name="pasted-empty-model",
        text=log(
            "[rank1]: RuntimeError: Error(s) in loading state_dict for TwoTowers:",
            "[rank1]:         size mismatch for tower.neck.0.weight: copying a param with shape torch.Size([256, 768, 1, 1]) from checkpoint, the shape in current model is torch.Size([0]).",
        ),
        primary="zero3/empty-weights-in-model",
        absent=("zero3/empty-weights-in-checkpoint",),
    ),
    WrittenLog(
        name="pasted-store-barrier",
        text=headless(
            "RuntimeError: Timed out initializing process group in store based barrier on rank: 7, for key: store_based_barrier_key:32 (world_size=8, worker_count=4, timeout=0:00:30)",
            (f"{SITE}/torch/distributed/distributed_c10d.py", 350, "_store_based_barrier", "raise RuntimeError("),
        ),
        primary="comm/missing-rank",
        accept=("comm/unreachable",),
    ),
    WrittenLog(
        name="pasted-older-release",
        text=headless(
            "ImportError: deepspeed>=0.9.3 is required for a normal functioning of this module, but found deepspeed==0.8.3.",
            ("/home/u/dolly/trainer.py", 241, "train", "training_args = TrainingArguments("),
        ),
        primary="version/incompatible",
    ),
    WrittenLog(
        name="pasted-dtype-in-zero3-linear",
        text=headless(
            "RuntimeError: expected mat1 and mat2 to have the same dtype, but got: float != c10::BFloat16",
            ("/home/u/modeling_moe.py", 425, "forward", "logits = F.linear(hidden.float(), self.weight, None)"),
            (f"{SITE}/deepspeed/runtime/zero/linear.py", 57, "forward", "output = input.matmul(weight.t())"),
        ),
        primary="launch/user-exception",
        absent=("deepspeed/internal-error",),
        line="same dtype",
    ),
    WrittenLog(
        name="pasted-agents-summary-glued",
        text=log(
            "Loading checkpoint shards:   0%|          | 0/2 [00:00<?, ?it/s]WARNING:torch.distributed.elastic.multiprocessing.api:Sending process 5 closing signal SIGTERM   ERROR:torch.distributed.elastic.multiprocessing.api:failed (exitcode: -9) local_rank: 4 (pid: 9) of binary: /home/u/bin/python   Traceback (most recent call last):",
            frame("/home/u/envs/b/bin/torchrun", 33, "<module>", "sys.exit(main())").splitlines(),
            "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ",
        ),
        primary="memory/host-oom-kill",
        absent=("launch/user-exception",),
    ),
    WrittenLog(
        name="pasted-exit-status-of-a-launcher",
        text=log(
            """
            ErrorMessage "raise subprocess.CalledProcessError
             subprocess.CalledProcessError: Command '['torchrun', 'train.py']' returned non-zero exit status 137."
            """
        ),
        primary="memory/host-oom-kill",
    ),
    WrittenLog(
        name="pasted-exit-status-of-ninja",
        text=log("subprocess.CalledProcessError: Command '['ninja', '-v']' returned non-zero exit status 1."),
        primary="launch/user-exception",
        accept=("build/compiler",),
        absent=("memory/host-oom-kill",),
    ),
    WrittenLog(
        name="pasted-word-of-nccl",
        text=log(
            """
            c5:34610:36821 [4] ib_plugin.c:1673 NCCL WARN NET/IB: Got completion from peer 10.0.1.23<34696> with status=5 opcode=0 len=0 vendor err 249 (Recv) hca mlx5_0
            [rank4]:[E1229 16:47:25.333820755 ProcessGroupNCCL.cpp:541] [Rank 4] found async exception when checking for NCCL errors: NCCL error: remote process exited or there was a network error, NCCL version 2.22.3
            ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.
            """
        ),
        primary="comm/ib-error",
        absent=("launch/user-exception",),
    ),
    WrittenLog(
        name="pasted-agents-error-only",
        text=log("torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ", "=" * 60, "train.py FAILED"),
        primary=None,
    ),
    WrittenLog(
        name="pasted-zero3-order-then-timeouts",
        text=log(
            "  3%|▎         | 270/9847 [05:50<3:17:42,  1.24s/it]Invalidate trace cache @ step 1: expected module 25, but got module 323",
            [
                f"[E ProcessGroupNCCL.cpp:467] [Rank {r}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=211067, OpType=_ALLGATHER_BASE, NumelIn=2359296, NumelOut=18874368, Timeout(ms)=1800000) ran for 1800001 milliseconds before timing out."
                for r in (1, 7, 2)
            ],
        ),
        primary="zero3/branch-hang",
    ),
    WrittenLog(name="pasted-notebook", text=notebook(), primary="build/compiler", absent=("launch/user-exception",)),
    WrittenLog(
        name="caught-alone-then-finished",
        text=log("Trying batch size 16", OOM, "Decreasing batch size to 8", trainer(falling(2)), DONE),
        primary=None,
    ),
    WrittenLog(
        name="caught-alone-in-a-service",
        text=log("ValueError: the request has 5000 tokens, at most 4096 are taken", [""], "200 OK"),
        primary=None,
    ),
    WrittenLog(
        name="requeued-and-done",
        text=log(
            "slurmstepd: error: *** JOB 4411 ON gpu03 CANCELLED AT 2024-05-01T03:00:00 DUE TO PREEMPTION ***",
            "Requeued job 4411, restart count 1",
            trainer(falling(2), first=3),
            DONE,
        ),
        primary=None,
    ),
    WrittenLog(
        name="exit-code-in-a-sample",
        text=log("Sample: {'text': 'the run exits with return code = -9', 'label': 'oom'}", trainer(falling(2)), DONE),
        primary=None,
    ),
    WrittenLog(
        name="caught-alone-before-the-traceback",
        text=log(
            ["ValueError: row 33 has no text", "", "Traceback (most recent call last):"],
            frame("/home/u/train.py", 7, "main", "loss = step(batch)").splitlines(),
            "KeyError: 'labels'",
            stopped(1),
        ),
        primary="launch/user-exception",
        line="KeyError",
    ),
    WrittenLog(
        name="agents-summary-only",
        text=log(torchrun_failed(-9, name="SIGKILL")),
        primary="memory/host-oom-kill",
        absent=("launch/user-exception",),
    ),
)
