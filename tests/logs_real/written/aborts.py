# ruff: noqa: E501
"""Logs about how processes end: signals, aborts, launchers and schedulers, and which of the reports is the root."""

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

GLOO_LOST = "[../third_party/gloo/gloo/transport/tcp/pair.cc:598] Connection closed by peer [10.0.0.12]:41872"
ALLREDUCE = (f"{SITE}/torch/distributed/distributed_c10d.py", 2806, "all_reduce", "work.wait()")
LOST = traceback("RuntimeError", GLOO_LOST, ALLREDUCE, prefix="[rank0]: ")


def abort_beside_a_lost_peer() -> str:
    """glibc found its heap damaged on rank 1; rank 0 only sees the connection go."""
    return log(
        trainer(falling(12)),
        "double free or corruption (!prev)",
        LOST,
        torchrun_failed(-6, rank=1, others=(0,), name="SIGABRT"),
    )


def abort_of_deepspeed_command() -> str:
    return log(launched(), trainer(falling(12)), "munmap_chunk(): invalid pointer", stopped(-6))


def abort_without_a_word() -> str:
    """Only the launcher's summary."""
    return log(torchrun_failed(-6, rank=3, others=(0, 1, 2), name="SIGABRT"))


def abort_of_a_library() -> str:
    return log(
        launched(),
        [bar(3, 200)],
        "python: ../src/tokenizer.cc:211: void Tokenizer::Encode(): Assertion `offset < size_' failed.",
        "Fatal Python error: Aborted",
        "",
        "Thread 0x00007f23c17fe640 (most recent call first):",
        '  File "/opt/conda/lib/python3.10/threading.py", line 324 in wait',
        "Current thread 0x00007f2a5e3fd740 (most recent call first):",
        '  File "data.py", line 31 in __getitem__',
        stopped(-6),
    )


def uncaught_cpp() -> str:
    return log(
        trainer(falling(4)),
        "terminate called after throwing an instance of 'std::out_of_range'",
        "  what():  vector::_M_range_check: __n (which is 512) >= this->size() (which is 512)",
        "train.sh: line 14: 41872 Aborted                 (core dumped) python train.py --deepspeed ds.json",
    )


def abort_cut_off() -> str:
    """The paste ends before any launcher speaks."""
    return log(trainer(falling(12)), "free(): invalid pointer")


def abort_under_mpirun() -> str:
    return log(
        [f"[1,{r}]<stdout>:step {s} loss {3 - s / 10:.2f}" for s in range(1, 6) for r in range(2)],
        "[1,1]<stderr>:corrupted size vs. prev_size",
        "[1,1]<stderr>:[gpu0304:40121] *** Process received signal ***",
        "[1,1]<stderr>:[gpu0304:40121] Signal: Aborted (6)",
        "[1,1]<stderr>:[gpu0304:40121] Signal code:  (-6)",
        "--------------------------------------------------------------------------",
        "Primary job  terminated normally, but 1 process returned",
        "a non-zero exit code. Per user-direction, the job has been aborted.",
        "--------------------------------------------------------------------------",
        "mpirun noticed that process rank 1 with PID 40121 on node gpu0304 exited on signal 6 (Aborted).",
    )


def abort_under_srun() -> str:
    return log(
        [f"{r}: step {s} loss {3 - s / 10:.2f}" for s in range(1, 6) for r in range(4)],
        "2: malloc(): unsorted double linked list corrupted",
        "srun: error: gpu07: task 2: Aborted (core dumped)",
        "srun: Terminating StepId=884211.0",
        "slurmstepd: error: *** STEP 884211.0 ON gpu07 CANCELLED AT 2024-05-11T10:20:12 ***",
        "srun: error: gpu07: tasks 0-1,3: Terminated",
    )


def abort_in_a_worker() -> str:
    message = "DataLoader worker (pid 4711) is killed by signal: Aborted. "
    where = (f"{SITE}/torch/utils/data/dataloader.py", 1176, "_try_get_data", "raise RuntimeError(")
    return log(trainer(falling(5)), traceback("RuntimeError", message, where), torchrun_failed(1))


def segfault_in_a_worker() -> str:
    message = "DataLoader worker (pid 4711) is killed by signal: Segmentation fault. "
    where = (f"{SITE}/torch/utils/data/dataloader.py", 1176, "_try_get_data", "raise RuntimeError(")
    return log(trainer(falling(5)), traceback("RuntimeError", message, where), stopped(1))


def illegal_instruction() -> str:
    return log(launched(), "Loading extension module cpu_adam...", stopped(-4))


def division_trap() -> str:
    return log(torchrun_failed(-8, rank=0, others=(1,), name="SIGFPE"))


def segfault_under_srun() -> str:
    """The other tasks are stopped by srun and the step is cancelled because of the first."""
    return log(
        "3: Loading extension module cpu_adam...",
        "srun: error: node07: task 3: Segmentation fault (core dumped)",
        "srun: Terminating StepId=884211.0",
        "slurmstepd: error: *** STEP 884211.0 ON node07 CANCELLED AT 2024-05-11T10:20:12 ***",
        "srun: error: node07: tasks 0-2: Terminated",
    )


def segfault_under_mpirun() -> str:
    return log(
        "[gpu0304:40121] *** Process received signal ***",
        "[gpu0304:40121] Signal: Segmentation fault (11)",
        "[gpu0304:40121] Signal code: Address not mapped (1)",
        "[gpu0304:40121] Failing at address: 0x10",
        "[gpu0304:40121] *** End of error message ***",
        "mpirun noticed that process rank 5 with PID 40121 on node gpu0304 exited on signal 11 (Segmentation fault).",
    )


def segfault_of_ucx() -> str:
    return log(
        trainer(falling(4)),
        "[node01:2121 :0:7025] Caught signal 11 (Segmentation fault: address not mapped to object at address 0x28)",
        "==== backtrace (tid:   7025) ====",
        " 0 0x0000000000014420 __funlockfile()  ???:0",
        stopped(-11),
    )


def segfault_in_a_container() -> str:
    """What `kubectl describe pod` says below the log."""
    state = """
    State:          Terminated
      Reason:       Error
      Exit Code:    139
    """
    return log(trainer(falling(4)), state)


def own_exception_then_cancelled_step() -> str:
    """srun stops the others because one task failed: the cancelled step is a consequence."""
    return log(
        [f"{r}: step {s} loss {3 - s / 10:.2f}" for s in range(1, 6) for r in range(4)],
        traceback(
            "KeyError", "'pixel_values'", ("collate.py", 18, "collate", "x = batch['pixel_values']"), prefix="3: "
        ),
        "srun: error: gpu07: task 3: Exited with exit code 1",
        "srun: Terminating StepId=884211.0",
        "slurmstepd: error: *** STEP 884211.0 ON gpu07 CANCELLED AT 2024-05-11T10:20:12 ***",
        "srun: error: gpu07: tasks 0-2: Terminated",
    )


def failed_step_only() -> str:
    """Nothing but srun's own words: one task failed with code 1, the step was cancelled for it."""
    return log(
        "srun: error: gpu07: task 3: Exited with exit code 1",
        "srun: Terminating StepId=884211.0",
        "slurmstepd: error: *** STEP 884211.0 ON gpu07 CANCELLED AT 2024-05-11T10:20:12 ***",
        "srun: error: gpu07: tasks 0-2: Terminated",
    )


def killed_then_cancelled_step() -> str:
    return log(
        trainer(falling(6)),
        "slurmstepd: error: Detected 1 oom_kill event in StepId=884211.0. Some of the step tasks have been OOM Killed.",
        "srun: error: gpu07: task 2: Out Of Memory",
        "srun: Terminating StepId=884211.0",
        "slurmstepd: error: *** STEP 884211.0 ON gpu07 CANCELLED AT 2024-05-11T10:20:12 ***",
    )


def cancelled_by_user() -> str:
    return log(
        trainer(falling(30)),
        "slurmstepd: error: *** JOB 884211 ON gpu07 CANCELLED AT 2024-05-11T10:20:12 ***",
        "srun: Job step aborted: Waiting up to 32 seconds for job step to finish.",
    )


def node_requeued() -> str:
    return log(
        trainer(falling(30)),
        "slurmstepd: error: *** STEP 884211.0 ON gpu07 CANCELLED AT 2024-05-11T10:20:12 DUE TO PREEMPTION ***",
    )


def pbs_walltime() -> str:
    return log(trainer(falling(30)), "=>> PBS: job killed: walltime 86432 exceeded limit 86400")


def lsf_limit() -> str:
    return log(
        trainer(falling(30)),
        "TERM_RUNLIMIT: job killed after reaching LSF run time limit.",
        "Exited with exit code 140.",
    )


def terminated_from_outside() -> str:
    """Somebody sent SIGTERM to the ranks themselves: the launcher only reports it."""
    return log(launched(), trainer(falling(30)), stopped(-15))


def main_process_interrupted() -> str:
    return log(
        launched(),
        trainer(falling(30)),
        ds("Killing subprocess 4100", where="launch.py:319:sigkill_handler"),
        ds("Main process received SIGTERM, exiting", where="launch.py:325:sigkill_handler"),
    )


def old_death_signal() -> str:
    """torch 1.13 under accelerate."""
    return log(
        trainer(falling(30)),
        "WARNING:torch.distributed.elastic.agent.server.api:Received 2 death signal, shutting down workers",
        "WARNING:torch.distributed.elastic.multiprocessing.api:Sending process 4100 closing signal SIGINT",
    )


def hangup_word() -> str:
    return log(
        trainer(falling(30)), "train.sh: line 9: 41872 Hangup                  torchrun --nproc_per_node 8 train.py"
    )


def exit_code_of_accelerate() -> str:
    """accelerate's own exception about a child that was killed by a signal hides the child."""
    return log(
        [bar(3, 200)],
        "Traceback (most recent call last):",
        '  File "/opt/conda/bin/accelerate", line 8, in <module>',
        "    sys.exit(main())",
        f'  File "{SITE}/accelerate/commands/launch.py", line 688, in simple_launcher',
        "    raise subprocess.CalledProcessError(returncode=process.returncode, cmd=cmd)",
        "subprocess.CalledProcessError: Command '['/opt/conda/bin/python', 'train.py']' died with <Signals.SIGSEGV: 11>.",
    )


def two_failures_first_counts() -> str:
    """Rank 2 raises; rank 0's broken pipe and the SIGTERMs follow; the summary names rank 0 as root."""
    own = traceback(
        "ValueError",
        "expected sequence of length 512 at dim 1 (got 511)",
        ("data.py", 44, "collate", "torch.tensor(x)"),
        prefix="[rank2]: ",
    )
    return log(trainer(falling(20)), own, LOST, torchrun_failed(1, rank=0, others=(1, 2, 3)))


def exit_code_only() -> str:
    return log(launched(), stopped(3))


CASES = (
    WrittenLog(name="abort-beside-a-lost-peer", text=abort_beside_a_lost_peer(), primary="launch/abort", also=("launch/peer-failure",),
               absent=("launch/user-exception", "launch/segfault", "memory/host-oom-kill")),
    WrittenLog(name="abort-of-deepspeed-command", text=abort_of_deepspeed_command(), primary="launch/abort", absent=("launch/user-exception",)),
    WrittenLog(name="abort-without-a-word", text=abort_without_a_word(), primary="launch/abort", absent=("comm/timeout",)),
    WrittenLog(name="abort-of-a-library", text=abort_of_a_library(), primary="launch/abort", absent=("launch/user-exception",)),
    WrittenLog(name="uncaught-cpp", text=uncaught_cpp(), primary="launch/abort", absent=("launch/user-exception",)),
    WrittenLog(name="abort-cut-off", text=abort_cut_off(), primary="launch/abort"),
    WrittenLog(name="abort-under-mpirun", text=abort_under_mpirun(), primary="launch/abort", absent=("launch/cancelled",)),
    WrittenLog(name="abort-under-srun", text=abort_under_srun(), primary="launch/abort", absent=("launch/user-exception",)),
    WrittenLog(name="abort-in-a-worker", text=abort_in_a_worker(), primary="launch/abort", absent=("launch/user-exception",)),
    WrittenLog(name="segfault-in-a-worker", text=segfault_in_a_worker(), primary="launch/segfault", absent=("launch/user-exception",)),
    WrittenLog(name="illegal-instruction", text=illegal_instruction(), primary="launch/signal", absent=("launch/user-exception",)),
    WrittenLog(name="division-trap", text=division_trap(), primary="launch/signal", absent=("launch/user-exception",)),
    WrittenLog(name="segfault-under-srun", text=segfault_under_srun(), primary="launch/segfault", absent=("launch/user-exception",)),
    WrittenLog(name="segfault-under-mpirun", text=segfault_under_mpirun(), primary="launch/segfault"),
    WrittenLog(name="segfault-of-ucx", text=segfault_of_ucx(), primary="launch/segfault"),
    WrittenLog(name="segfault-in-a-container", text=segfault_in_a_container(), primary="launch/segfault"),
    WrittenLog(name="own-exception-then-cancelled-step", text=own_exception_then_cancelled_step(), primary="launch/user-exception", line="pixel_values"),
    WrittenLog(name="failed-step-only", text=failed_step_only(), primary="launch/user-exception", line="task 3"),
    WrittenLog(name="killed-then-cancelled-step", text=killed_then_cancelled_step(), primary="memory/host-oom-kill"),
    WrittenLog(name="cancelled-by-user", text=cancelled_by_user(), primary="launch/cancelled"),
    WrittenLog(name="preempted-step", text=node_requeued(), primary="launch/cancelled", line="PREEMPTION"),
    WrittenLog(name="pbs-walltime", text=pbs_walltime(), primary="launch/cancelled"),
    WrittenLog(name="lsf-limit", text=lsf_limit(), primary="launch/cancelled"),
    WrittenLog(name="terminated-from-outside", text=terminated_from_outside(), primary="launch/cancelled", absent=("launch/user-exception",)),
    WrittenLog(name="main-process-interrupted", text=main_process_interrupted(), primary="launch/cancelled"),
    WrittenLog(name="old-death-signal", text=old_death_signal(), primary="launch/cancelled"),
    WrittenLog(name="hangup-word", text=hangup_word(), primary="launch/sighup"),
    WrittenLog(name="exit-code-of-accelerate", text=exit_code_of_accelerate(), primary="launch/segfault", absent=("launch/user-exception",)),
    WrittenLog(name="two-failures-first-counts", text=two_failures_first_counts(), primary="launch/user-exception", line="length 512", also=("launch/peer-failure",)),
    WrittenLog(name="exit-code-only", text=exit_code_only(), primary="launch/user-exception", line="return code = 3"),
)  # fmt: skip
