# ruff: noqa: E501
"""Logs about processes: memory that ran out, kills, launchers, and exceptions under their summaries."""

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
)

CUDA = (
    "CUDA out of memory. Tried to allocate {size}. GPU 0 has a total capacity of 79.15 GiB of which {free} is free. "
    "Including non-PyTorch memory, this process has 78.90 GiB memory in use. Of the allocated memory {used} is "
    "allocated by PyTorch, and {reserved} is reserved by PyTorch but unallocated. If reserved but unallocated memory "
    "is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)


def oom_in_backward() -> str:
    text = CUDA.format(size="2.32 GiB", free="254.06 MiB", used="75.11 GiB", reserved="2.61 GiB")
    where = (f"{SITE}/deepspeed/runtime/engine.py", 1976, "backward", "self.optimizer.backward(loss)")
    return log(trainer(falling(12)), traceback("torch.OutOfMemoryError", text, where, prefix="[rank1]: "),
               torchrun_failed(1, rank=1, others=(0,)))  # fmt: skip


def oom_of_old_torch() -> str:
    """torch 1.13: a RuntimeError, while weights go to the GPU."""
    text = ("CUDA out of memory. Tried to allocate 508.00 MiB (GPU 1; 23.69 GiB total capacity; 22.51 GiB already "
            "allocated; 196.69 MiB free; 22.53 GiB reserved in total by PyTorch) If reserved memory is >> allocated "
            "memory try setting max_split_size_mb to avoid fragmentation.")  # fmt: skip
    where = (f"{SITE}/deepspeed/runtime/engine.py", 1054, "_configure_distributed_model", "self.module.to(self.device)")
    start = (f"{SITE}/deepspeed/__init__.py", 125, "initialize", "engine = DeepSpeedEngine(args=args,")
    return log(launched(), traceback("RuntimeError", text, start, where), stopped(1))


def killed_while_loading() -> str:
    lines = ["Loading checkpoint shards:   0%|          | 0/7 [00:00<?, ?it/s]" for _ in range(4)]
    return log(launched(gpus=4), lines, stopped(-9, gpus=4))


def slurm_oom() -> str:
    return log(
        trainer(falling(6)),
        """
        slurmstepd: error: Detected 1 oom_kill event in StepId=1422883.0. Some of the step tasks have been OOM Killed.
        srun: error: node042: task 3: Out Of Memory
        srun: Terminating StepId=1422883.0
        """,
    )


def kubernetes_oom() -> str:
    return log(
        trainer(falling(4)),
        torchrun_failed(-9, rank=2, others=(0, 1, 3), name="SIGKILL"),
        """
        Events:
          Type     Reason     Age    From     Message
          Warning  OOMKilling 12s    kubelet  Memory cgroup out of memory: Killed process 4102 (python) total-vm:311211884kB
            Last State:     Terminated
              Reason:       OOMKilled
              Exit Code:    137
        """,
    )


def time_limit() -> str:
    return log(
        trainer(falling(40)),
        """
        slurmstepd: error: *** STEP 1422883.0 ON node042 CANCELLED AT 2024-05-11T22:00:12 DUE TO TIME LIMIT ***
        slurmstepd: error: *** JOB 1422883 ON node042 CANCELLED AT 2024-05-11T22:00:12 DUE TO TIME LIMIT ***
        srun: Job step aborted: Waiting up to 32 seconds for job step to finish.
        """,
    )


def preempted() -> str:
    lines = [
        "W0511 22:00:12.118000 4000 torch/distributed/elastic/agent/server/api.py:741] Received 15 death signal, "
        "shutting down workers",
        "W0511 22:00:12.119000 4000 torch/distributed/elastic/multiprocessing/api.py:900] Sending process 4100 "
        "closing signal SIGTERM",
        "Traceback (most recent call last):",
        f'  File "{SITE}/torch/distributed/elastic/multiprocessing/api.py", line 87, in _terminate_process_handler',
        '    raise SignalException(f"Process {os.getpid()} got signal: {sigval}", sigval=sigval)',
        "torch.distributed.elastic.multiprocessing.api.SignalException: Process 4000 got signal: 15",
    ]
    return log(trainer(falling(40)), lines)


def terminal_closed() -> str:
    lines = [
        "WARNING:torch.distributed.elastic.agent.server.api:Received 1 death signal, shutting down workers",
        "WARNING:torch.distributed.elastic.multiprocessing.api:Sending process 4100 closing signal SIGHUP",
        "Traceback (most recent call last):",
        f'  File "{SITE}/torch/distributed/elastic/multiprocessing/api.py", line 62, in _terminate_process_handler',
        '    raise SignalException(f"Process {os.getpid()} got signal: {sigval}", sigval=sigval)',
        "torch.distributed.elastic.multiprocessing.api.SignalException: Process 4000 got signal: 1",
    ]
    return log([bar(312, 4000)], lines)


def segfault() -> str:
    return log(launched(), ds("Setting ds_accelerator to cuda (auto detect)"), stopped(-11))


def port_taken() -> str:
    message = (
        "The server socket has failed to listen on any local network address. port: 29500, useIpv6: false, code: -98, "
        "name: EADDRINUSE, message: address already in use"
    )
    where = (f"{SITE}/torch/distributed/rendezvous.py", 189, "_create_c10d_store", "return TCPStore(")
    return log(traceback("torch.distributed.DistNetworkError", message, where))


def no_launcher() -> str:
    where = (f"{SITE}/deepspeed/comm/comm.py", 680, "mpi_discovery", "from mpi4py import MPI")
    return log(
        ds("Not using the DeepSpeed or dist launchers, attempting to detect MPI environment...",
           where="comm.py:658:init_distributed"),
        traceback("ModuleNotFoundError", "No module named 'mpi4py'", where),
    )  # fmt: skip


def argument_refused() -> str:
    usage = """
    usage: train.py [-h] --data DATA [--lr LR]
    train.py: error: unrecognized arguments: --local_rank=0
    usage: train.py [-h] --data DATA [--lr LR]
    train.py: error: unrecognized arguments: --local_rank=1
    """
    return log(launched(), usage, stopped(2))


def own_exception_first() -> str:
    """Rank 3 fails in its data; the others only lose it, and the summary names rank 0."""
    lost = "NCCL communicator was aborted on rank 0."
    collective = (f"{SITE}/torch/distributed/distributed_c10d.py", 2501, "all_reduce", "work.wait()")
    return log(
        trainer(falling(30)),
        traceback("ValueError", "num_samples should be a positive integer value, but got num_samples=0",
                  ("data.py", 41, "build", "return RandomSampler(part)"), prefix="[rank3]: "),
        traceback("torch.distributed.DistBackendError", lost, collective, prefix="[rank0]: "),
        torchrun_failed(1, rank=0, others=(1, 2)),
    )  # fmt: skip


def summary_only() -> str:
    """Only the launcher's words are there."""
    return log(torchrun_failed(1, rank=2, others=(0, 1)))


def no_ssh() -> str:
    return log(
        """
        [2024-05-11 10:00:00,000] [INFO] [multinode_runner.py:82:get_cmd] Running on the following workers: node01,node02
        pdsh@node01: node02: ssh exited with exit code 255
        node02: Permission denied (publickey,password).
        """
    )


def two_world_sizes() -> str:
    message = "Timed out after 1801 seconds waiting for clients. 8/16 clients joined."
    where = (f"{SITE}/torch/distributed/rendezvous.py", 174, "_create_c10d_store", "return TCPStore(")
    return log(
        "[2024-05-11 10:00:00,000] [INFO] [launch.py:163:main] dist_world_size=16",
        "[2024-05-11 10:00:01,000] [INFO] [launch.py:163:main] dist_world_size=8",
        traceback("torch.distributed.DistStoreError", message, where),
    )


def nobody_came() -> str:
    message = "Timed out after 1801 seconds waiting for clients. 8/16 clients joined."
    where = (f"{SITE}/torch/distributed/rendezvous.py", 174, "_create_c10d_store", "return TCPStore(")
    return log(
        "[2024-05-11 10:00:00,000] [INFO] [launch.py:163:main] dist_world_size=16",
        traceback("torch.distributed.DistStoreError", message, where),
    )


def asked_for_the_impossible() -> str:
    text = CUDA.format(size="14901161193.85 GiB", free="60.1 GiB", used="12.00 GiB", reserved="0.40 GiB")
    return log(
        trainer(falling(3)),
        traceback("torch.OutOfMemoryError", text, ("model.py", 12, "forward", "x = torch.empty(n, d)")),
    )


def bus_error() -> str:
    text = ("DataLoader worker (pid 5122) is killed by signal: Bus error. It is possible that dataloader's workers are "
            "out of shared memory. Please try to raise your shared memory limit.")  # fmt: skip
    return log(
        "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm).",
        traceback("RuntimeError", text, (f"{SITE}/torch/utils/data/dataloader.py", 1133, "_try_get_data", "raise")),
        torchrun_failed(1),
    )


CASES = (
    WrittenLog(name="oom-in-backward", text=oom_in_backward(), primary="memory/gpu-oom-step",
               also=("launch/peer-failure",), line="CUDA out of memory"),
    WrittenLog(name="oom-of-old-torch", text=oom_of_old_torch(), primary="memory/gpu-oom-init", line="CUDA out of memory"),
    WrittenLog(name="killed-while-loading", text=killed_while_loading(), primary="memory/host-oom-kill",
               accept=("launch/killed",), line="return code = -9"),
    WrittenLog(name="slurm-oom", text=slurm_oom(), primary="memory/host-oom-kill", line="oom_kill"),
    WrittenLog(name="kubernetes-oom", text=kubernetes_oom(), primary="memory/host-oom-kill",
               also=("launch/peer-failure",)),
    WrittenLog(name="time-limit", text=time_limit(), primary="launch/cancelled", line="DUE TO TIME LIMIT"),
    WrittenLog(name="preempted", text=preempted(), primary="launch/cancelled", line="signal", absent=("launch/user-exception",)),
    WrittenLog(name="terminal-closed", text=terminal_closed(), primary="launch/sighup", line="signal",
               absent=("launch/cancelled",)),
    WrittenLog(name="segfault", text=segfault(), primary="launch/segfault", line="return code = -11"),
    WrittenLog(name="port-taken", text=port_taken(), primary="launch/port-in-use", line="EADDRINUSE"),
    WrittenLog(name="no-launcher", text=no_launcher(), primary="launch/launcher-missing", line="mpi4py"),
    WrittenLog(name="argument-refused", text=argument_refused(), primary="launch/local-rank-mismatch",
               line="unrecognized arguments"),
    WrittenLog(name="own-exception-first", text=own_exception_first(), primary="launch/user-exception",
               also=("launch/peer-failure",), line="num_samples should be"),
    WrittenLog(name="summary-only", text=summary_only(), primary="launch/user-exception"),
    WrittenLog(name="no-ssh", text=no_ssh(), primary="launch/ssh-or-hostfile"),
    WrittenLog(name="two-world-sizes", text=two_world_sizes(), primary="launch/world-size-mismatch",
               absent=("launch/user-exception",)),
    WrittenLog(name="nobody-came", text=nobody_came(), primary="comm/missing-rank", accept=("comm/unreachable",),
               absent=("launch/user-exception", "launch/world-size-mismatch")),
    WrittenLog(name="bogus-size", text=asked_for_the_impossible(), primary="memory/bogus-allocation"),
    WrittenLog(name="bus-error", text=bus_error(), primary="memory/shm-exhausted"),
)  # fmt: skip
