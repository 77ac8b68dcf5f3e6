"""Logs of jobs that torch's spawn, torchrun or a scheduler ended, with only that launcher's words about it."""

from collections.abc import Sequence

from tests.logs_real.written.parts import SITE, WrittenLog, falling, log, traceback, trainer

SPAWN = (f"{SITE}/torch/multiprocessing/spawn.py", 202, "join", "raise ProcessExitedException(")
AGENT = (
    (f"{SITE}/torch/distributed/run.py", 910, "run", "elastic_launch("),
    (
        f"{SITE}/torch/distributed/elastic/multiprocessing/api.py",
        62,
        "_terminate_process_handler",
        "raise SignalException(",
    ),
)


def spawned(ended: str) -> str:
    return log(trainer(falling(3)), traceback("torch.multiprocessing.spawn.ProcessExitedException", ended, SPAWN))


def spawned_and_raised() -> str:
    """The exception of the process stands in the message of the one that spawn raises."""
    message = """

-- Process 1 terminated with the following error:
Traceback (most recent call last):
  File "/opt/conda/lib/python3.10/site-packages/torch/multiprocessing/spawn.py", line 90, in _wrap
    fn(i, *args)
  File "/work/train.py", line 55, in worker
    raise RuntimeError("dataset has 3 columns, 4 expected")
RuntimeError: dataset has 3 columns, 4 expected"""
    return log(traceback("torch.multiprocessing.spawn.ProcessRaisedException", message, SPAWN))


def signalled(number: int, before: Sequence[str] = ()) -> str:
    """torchrun itself got the signal, and only its own traceback says so."""
    name = "torch.distributed.elastic.multiprocessing.api.SignalException"
    return log(trainer(falling(9)), before, traceback(name, f"Process 2313 got signal: {number}", *AGENT))


WRAPPER = ("run.py", 3, "<module>", "subprocess.run(command, check=True)")
SYSTEMD = "Mar 10 13:53:02 gpu07 systemd[1]: train.service: Main process exited, "
KILLED_TASK = ("srun: error: gpu187: task 3: Killed",)
OWN = traceback("KeyError", "'prompt'", ("data.py", 3, "load", "row['prompt']"), prefix="[rank1]: ")

CASES = (
    WrittenLog(
        name="spawned-killed",
        text=spawned("process 0 terminated with signal SIGKILL"),
        primary="memory/host-oom-kill",
        absent=("launch/user-exception",),
        line="SIGKILL",
    ),
    WrittenLog(
        name="spawned-segfault",
        text=spawned("process 1 terminated with signal SIGSEGV"),
        primary="launch/segfault",
        absent=("launch/user-exception",),
    ),
    WrittenLog(
        name="spawned-code",
        text=spawned("process 1 terminated with exit code 3"),
        primary="launch/user-exception",
        line="exit code 3",
    ),
    WrittenLog(
        name="spawned-raised",
        text=spawned_and_raised(),
        primary="launch/user-exception",
        line="RuntimeError: dataset has 3 columns",
    ),
    WrittenLog(name="agent-hangup", text=signalled(1), primary="launch/sighup", absent=("launch/cancelled",)),
    WrittenLog(name="agent-terminated", text=signalled(15), primary="launch/cancelled", absent=("launch/sighup",)),
    WrittenLog(
        name="agent-terminated-after-a-kill",
        text=signalled(15, KILLED_TASK),
        primary="memory/host-oom-kill",
        absent=("launch/cancelled",),
    ),
    WrittenLog(
        name="agent-terminated-after-an-exception",
        text=signalled(15, OWN),
        primary="launch/user-exception",
        absent=("launch/cancelled",),
        line="KeyError",
    ),
    WrittenLog(
        name="wrapper-of-a-launcher",
        text=log(
            trainer(falling(9)),
            traceback(
                "subprocess.CalledProcessError",
                "Command '['deepspeed', 'train.py', '--lr', '1e-5']' returned non-zero exit status 247.",
                WRAPPER,
            ),
        ),
        primary="memory/host-oom-kill",
        absent=("launch/user-exception",),
        line="status 247",
    ),
    WrittenLog(
        name="wrapper-without-a-word",
        text=log(
            traceback(
                "subprocess.CalledProcessError",
                "Command '['torchrun', '--nnodes', '1', 'launcher.py', 'x.yaml']' returned non-zero exit status 1.",
                WRAPPER,
            )
        ),
        primary="launch/user-exception",
        line="exit status 1",
    ),
    WrittenLog(
        name="wrapper-of-another-tool",
        text=log(
            traceback(
                "subprocess.CalledProcessError",
                "Command '['deepspeed_data/convert.sh', 'a']' returned non-zero exit status 2.",
                WRAPPER,
            )
        ),
        primary="launch/user-exception",
        line="convert.sh",
    ),
    *(
        WrittenLog(name=f"systemd-{ended[5:11]}", text=log(trainer(falling(9)), SYSTEMD + ended), primary=primary)
        for ended, primary in (
            ("code=exited, status=1/FAILURE", "launch/user-exception"),
            ("code=dumped, status=11/SEGV", "launch/segfault"),
            ("code=killed, status=9/KILL", "memory/host-oom-kill"),
        )
    ),
    WrittenLog(
        name="compose-code",
        text=log(trainer(falling(4)), "train_1 exited with code 1"),
        primary="launch/user-exception",
    ),
    WrittenLog(
        name="compose-signal", text=log(trainer(falling(4)), "train-1 exited with code 139"), primary="launch/segfault"
    ),
    WrittenLog(
        name="helpers-exits",
        text=log(
            trainer(falling(4)), "ffmpeg exited with code 1", trainer(falling(4), first=5), "hook exited with code 0"
        ),
        primary=None,
    ),
    WrittenLog(
        name="pbs-memory",
        text=log(trainer(falling(9)), "=>> PBS: job killed: mem 268435456kb exceeded limit 263192576kb"),
        primary="memory/host-oom-kill",
        absent=("launch/cancelled",),
        line="exceeded limit",
    ),
    WrittenLog(
        name="lsf-memory",
        text=log(
            trainer(falling(9)),
            "TERM_MEMLIMIT: job killed after reaching LSF memory usage limit.",
            "Exited with exit code 130.",
        ),
        primary="memory/host-oom-kill",
        absent=("launch/cancelled",),
        line="TERM_MEMLIMIT",
    ),
)
