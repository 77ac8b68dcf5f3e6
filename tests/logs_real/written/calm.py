# ruff: noqa: E501
"""Logs in which nothing is wrong, or nothing of training: other programs, data with words of failure, old scares."""

from tests.logs_real.written.communication import nccl_init
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
    torchrun_failed,
    traceback,
    trainer,
)

END = "{'train_runtime': 812.4, 'train_samples_per_second': 12.1, 'train_loss': 1.61, 'epoch': 1.0}"


def vllm_server() -> str:
    return log(
        "INFO 05-11 10:00:01 llm_engine.py:161] Initializing an LLM engine (v0.4.2) with config: model='meta-llama/Meta-Llama-3-8B', dtype=torch.bfloat16, max_seq_len=8192",
        "INFO 05-11 10:00:09 utils.py:660] Found nccl from library /root/.config/vllm/nccl/cu12/libnccl.so.2.18.1",
        "INFO 05-11 10:00:12 model_runner.py:175] Loading model weights took 14.9605 GB",
        "WARNING 05-11 10:00:12 custom_all_reduce.py:158] Custom allreduce is disabled because your platform lacks GPU P2P capability or P2P test failed. To silence this warning, specify disable_custom_all_reduce=True explicitly.",
        "INFO 05-11 10:00:30 gpu_executor.py:114] # GPU blocks: 27896, # CPU blocks: 2048",
        "INFO:     Uvicorn running on http://0.0.0.0:8000 (Press CTRL+C to quit)",
        [
            f"INFO 05-11 10:0{i}:00 metrics.py:334] Avg prompt throughput: 110.{i} tokens/s, Avg generation throughput: 33.1 tokens/s, Running: 3 reqs, Swapped: 0 reqs, Pending: 0 reqs, GPU KV cache usage: 1.{i}%"
            for i in range(1, 9)
        ],
        'INFO:     10.0.0.7:51022 - "POST /v1/completions HTTP/1.1" 200 OK',
    )


def ray_serving_shut_down() -> str:
    """vLLM's own goodbye at a Ctrl-C."""
    return log(
        'INFO:     10.0.0.7:51022 - "POST /v1/completions HTTP/1.1" 200 OK',
        "INFO:     Shutting down",
        "INFO:     Waiting for application shutdown.",
        "INFO:     Application shutdown complete.",
        "INFO:     Finished server process [1]",
        "[rank0]:[W511 10:30:01.118 ProcessGroupNCCL.cpp:1250] Warning: WARNING: process group has NOT been destroyed before we destruct ProcessGroupNCCL. On normal program exit, the application should call destroy_process_group to ensure that any pending NCCL operations have finished in this process.",
    )


def dump_flag() -> str:
    """torch 2.6 at the end of a good run: the store of rank 0 is gone first."""
    warn = [
        f"[rank{r}]:[W511 10:30:01.11 TCPStore.cpp:125] [c10d] recvValue failed on SocketImpl(fd=62, addr=[node01]:43882, remote=[node01]:29500): failed to recv, got 0 bytes"
        for r in (1, 2, 3)
    ] + [
        f'[rank{r}]:[W511 10:30:01.12 ProcessGroupNCCL.cpp:1659] [PG ID 0 PG GUID 0(default_pg) Rank {r}] Failed to check the "should dump" flag on TCPStore, (maybe TCPStore server has shut down too early), with error: failed to recv, got 0 bytes'
        for r in (1, 2, 3)
    ]
    return log(launched(gpus=4), trainer(falling(60)), END, warn, finished(gpus=4))


def rejoined_socket() -> str:
    return log(
        "[W socket.cpp:697] [c10d] The client socket has failed to connect to [node01]:29500 (errno: 111 - Connection refused).",
        "[W socket.cpp:464] [c10d] The server socket cannot be initialized on [::]:29500 (errno: 97 - Address family not supported by protocol).",
        "[W socket.cpp:601] [c10d] The IPv6 network addresses of (node01, 29500) cannot be retrieved (gai error: -2 - Name or service not known).",
        trainer(falling(60)),
    )


def tensorboard_port() -> str:
    return log(
        launched(),
        "TensorBoard could not bind to port 6006, it was already in use",
        "ERROR: TensorBoard could not bind to port 6006, Address already in use",
        trainer(falling(60)),
        END,
    )


def ecc_counts() -> str:
    return log(
        "    ECC Errors",
        "        Volatile",
        "            SRAM Correctable              : 0",
        "            SRAM Uncorrectable            : 0",
        "GPU 0: uncorrectable ECC errors: 0, remapped rows pending: No",
        "| N/A   34C    P0              52W / 300W |      4MiB / 81920MiB |      0%      Default |  Volatile Uncorr. ECC 0",
        trainer(falling(60)),
        END,
    )


def data_about_failures() -> str:
    rows = [
        '{"text": "the process was Killed and then Aborted (core dumped)", "label": "error"}',
        "sample 3: Segmentation fault (core dumped) when I import torch, please help",
        "sample 4: free(): invalid pointer, what does it mean?",
        "sample 5: slurmstepd says CANCELLED, exit code 137, out of memory",
        "sample 6: watchdog thread terminated with exception: CUDA error: device-side assert",
        "sample 7: mpirun noticed that process rank 1 exited on signal 9",
    ]
    return log(launched(), rows, trainer(falling(60)), END, finished())


def questions_as_answers() -> str:
    """Generated text, with a traceback in the middle, while training goes on."""
    text = [
        "completion: To fix `NCCL communicator was aborted`, raise the timeout.",
        "completion: The message 'terminate called after throwing an instance of std::bad_alloc' means no memory.",
    ]
    return log(launched(), trainer(falling(20)), text, trainer(falling(40), first=21), END)


def restarted_by_torchrun() -> str:
    """torchrun starts the group again after a lost peer, and the job then ends well."""
    return log(
        trainer(falling(20)),
        traceback(
            "RuntimeError",
            "[../third_party/gloo/gloo/transport/tcp/pair.cc:598] Connection closed by peer [10.0.0.12]:41872",
            ("train.py", 9, "sync", "dist.barrier()"),
            prefix="[rank0]: ",
        ),
        "INFO:torch.distributed.elastic.agent.server.api:[default] Worker group FAILED. 3/3 attempts left; will restart worker group",
        trainer(falling(60), first=21),
        END,
    )


def restarted_after_an_abort() -> str:
    return log(
        trainer(falling(20)),
        "double free or corruption (!prev)",
        "train.sh: line 14: 41872 Aborted                 (core dumped) python train.py",
        "restarting from out/checkpoint-20",
        trainer(falling(60), first=21),
        END,
    )


def aborted_after_the_work() -> str:
    """gloo sometimes aborts when the interpreter ends; all was done and saved."""
    return log(
        trainer(falling(60)),
        END,
        "Training completed. Model saved to out/",
        "terminate called after throwing an instance of 'gloo::IoException'",
        "  what():  [../third_party/gloo/gloo/transport/tcp/pair.cc:598] Connection closed by peer [127.0.0.1]:41872",
        torchrun_failed(-6, rank=1, name="SIGABRT"),
    )


def zero_exit_codes() -> str:
    """A pod that did its work, and codes of answers that were run in a sandbox."""
    state = """
    State:          Terminated
      Reason:       Completed
      Exit Code:    0
    """
    return log(trainer(falling(60)), "Exit code: 1", "Exit code: 139", state)


def deprecations() -> str:
    return log(
        f"{SITE}/torch/distributed/launch.py:181: FutureWarning: The module torch.distributed.launch is deprecated and will be removed in future. Use torchrun.",
        "Note that --use-env is set by default in torchrun. If your script expects `--local-rank` argument to be set, please change it to read from `os.environ['LOCAL_RANK']` instead.",
        "W0511 10:00:00.118000 4000 torch/distributed/run.py:793] Setting OMP_NUM_THREADS environment variable for each process to be 1 in default, to avoid your system being overloaded",
        f"{SITE}/torch/utils/checkpoint.py:91: UserWarning: None of the inputs have requires_grad=True. Gradients will be None",
        f"{SITE}/torch/utils/checkpoint.py:464: UserWarning: torch.utils.checkpoint: the use_reentrant parameter should be passed explicitly.",
        f"{SITE}/torch/nn/parallel/distributed.py:1: UserWarning: find_unused_parameters=True was specified in DDP constructor, but did not find any unused parameters",
        trainer(falling(60)),
        END,
    )


def moe_that_learns() -> str:
    return log('{"model_type": "mixtral", "num_local_experts": 8}', ds("Creating torch.bfloat16 ZeRO stage 3 optimizer"),
               "Setting MixtralSparseMoeBlock as leaf module", trainer(falling(60)), END)  # fmt: skip


def trace_changes() -> str:
    return log(ds("Creating torch.bfloat16 ZeRO stage 3 optimizer"),
               [f"Invalidate trace cache @ step {s}: expected module {s}, but got module 12" for s in range(1, 9)], trainer(falling(60)), END)  # fmt: skip


def eval_between() -> str:
    return log(
        trainer(falling(40)),
        [f"{p}%|{'█' * (p // 10):<10}| {p}/100 [00:{p % 60:02d}<00:11, 1.3it/s]" for p in range(0, 101, 20)],
        "{'eval_loss': 1.93, 'eval_runtime': 44.1, 'epoch': 0.1}",
        trainer(falling(40), first=41),
        END,
    )


def nccl_of_two_nodes() -> str:
    """InfiniBand with everything that its start prints."""
    lines = [
        "gpu01:88:140 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB eth0:10.0.0.4<0>",
        "gpu01:88:140 [0] NCCL INFO Setting affinity for GPU 0 to ffff",
        "gpu01:88:140 [0] NCCL INFO Channel 00/0 : 7[7] -> 8[0] [receive] via NET/IB/0/GDRDMA",
        "gpu01:88:140 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/IPC/read",
        "gpu01:88:141 [0] NCCL INFO NET/IB : mlx5_1:1 Got async event : port active",
        "gpu01:88:141 [0] misc/ibvwrap.cc:190 NCCL WARN Call to ibv_open_device failed",
    ]
    return log(nccl_init("gpu01", 88, 0), lines, trainer(falling(60)), END)


def evaluation_harness() -> str:
    return log(
        "2024-05-11:10:00:01,118 INFO     [evaluator.py:131] Setting random seed to 0 | Setting numpy seed to 1234",
        "2024-05-11:10:00:02,118 WARNING  [task.py:325] [Task: gsm8k] has_training_docs and has_validation_docs are False, using test_docs as fewshot_docs but this is not recommended.",
        [
            f"Running loglikelihood requests: {p:3d}%|{'█' * (p // 10):<10}| {p * 70}/7000 [0{p // 20}:00<01:00, 71.1it/s]"
            for p in range(0, 101, 20)
        ],
        "|Tasks|Version|     Filter     |n-shot|  Metric   |   |Value |   |Stderr|",
        "|gsm8k|      3|flexible-extract|     5|exact_match|↑  |0.5080|±  |0.0138|",
    )


def pytest_output() -> str:
    return log(
        "============================= test session starts ==============================",
        "collected 3 items",
        "tests/test_errors.py::test_out_of_memory_is_reported PASSED                  [ 33%]",
        "tests/test_errors.py::test_killed_rank PASSED                                [ 66%]",
        "tests/test_errors.py::test_timeout PASSED                                    [100%]",
        "============================== 3 passed in 4.21s ===============================",
    )


def wandb_noise() -> str:
    return log(
        "wandb: WARNING A graphql request initiated by the public wandb API timed out (timeout=19 sec). Create a new API with an integer timeout larger than 19.",
        "wandb: Network error (ConnectionError), entering retry loop.",
        trainer(falling(30)),
        "wandb: Network error resolved after 0:00:31.2, resuming normal operation.",
        trainer(falling(30), first=31),
        END,
    )


def slow_first_step() -> str:
    return log(launched(), "Using /root/.cache/torch_extensions/py310_cu121 as PyTorch extensions root...", "Loading extension module cpu_adam...",
               "Time to load cpu_adam op: 2.31 seconds", [bar(1, 500, speed="71.02s/it"), hf(1, 2.8)], [bar(s, 500, speed="3.02s/it") for s in range(2, 30)])  # fmt: skip


def ranks_with_batches() -> str:
    return log(["rank 0: 212 batches", "rank 1: 212 batches"], trainer(falling(60)), END)


def unequal_but_done() -> str:
    """DistributedSampler's last batch: the numbers differ, the job joins them and ends."""
    return log(["rank 0: 212 batches", "rank 1: 211 batches"], trainer(falling(60)), END, finished())


def killed_child_handled() -> str:
    """A helper of the data pipeline is killed and started again."""
    return log(
        trainer(falling(30)),
        "data_server.sh: line 3: 991 Killed                  python serve_shards.py",
        trainer(falling(60), first=31),
        END,
    )


def megabatch_words() -> str:
    return log("aborting is not needed: all 64 workers joined", "timeout=1800 is in force", "signal handlers installed (SIGTERM, SIGABRT)",
               "NCCL_ASYNC_ERROR_HANDLING=1", trainer(falling(60)), END)  # fmt: skip


def healthy_barrier_words() -> str:
    return log(
        [f"[rank{r}]: passed monitored barrier in 0.{r}2 s" for r in range(4)],
        "flight recorder: TORCH_NCCL_TRACE_BUFFER_SIZE=2000, dump on timeout enabled",
        trainer(falling(60)),
    )


def launcher_banner_only() -> str:
    return log(launched(gpus=8))


def sagemaker_words() -> str:
    return log(
        "2024-05-11 10:00:01,118 sagemaker-training-toolkit INFO     Invoking user script",
        "2024-05-11 10:00:01,218 sagemaker-training-toolkit INFO     No Neurons detected (normal if no neurons installed)",
        [f"[1,mpirank:0,algo-1]<stdout>:{line}" for line in trainer(falling(20))],
        "2024-05-11 10:30:01,118 sagemaker-training-toolkit INFO     Reporting training SUCCESS",
    )


def exit_code_zero_words() -> str:
    return log(trainer(falling(60)), END, "INFO:torch.distributed.elastic.agent.server.api:[default] worker group successfully finished. Waiting 300 seconds for other agents to finish.",
               "INFO:torch.distributed.elastic.agent.server.api:Done waiting for other agents. Elapsed: 0.0003 seconds")  # fmt: skip


def warned_of_leaks() -> str:
    return log(trainer(falling(60)), END,
               "/opt/conda/lib/python3.10/multiprocessing/resource_tracker.py:224: UserWarning: resource_tracker: There appear to be 12 leaked semaphore objects to clean up at shutdown",
               "[rank0]:[W924 19:01:01.260656038 CudaIPCTypes.cpp:16] Producer process has been terminated before all shared CUDA tensors released. See Note [Sharing CUDA tensors]", finished())  # fmt: skip


_ALL = (
    vllm_server, ray_serving_shut_down, dump_flag, rejoined_socket, tensorboard_port, ecc_counts, data_about_failures, questions_as_answers,
    restarted_by_torchrun, restarted_after_an_abort, aborted_after_the_work, zero_exit_codes, deprecations, moe_that_learns, trace_changes,
    eval_between, nccl_of_two_nodes, evaluation_harness, pytest_output, wandb_noise, slow_first_step, ranks_with_batches, unequal_but_done,
    killed_child_handled, megabatch_words, healthy_barrier_words, launcher_banner_only, sagemaker_words, exit_code_zero_words, warned_of_leaks,
)  # fmt: skip
CASES = tuple(WrittenLog(name=one.__name__.replace("_", "-"), text=one(), primary=None) for one in _ALL)
