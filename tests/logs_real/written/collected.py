# ruff: noqa: E501
"""Logs with what collectors put before each line, as many as there are: nobody can list them."""

from tests.logs_real.written.parts import (
    SITE,
    WrittenLog,
    behind,
    falling,
    log,
    stopped,
    torchrun_failed,
    traceback,
    trainer,
)

PREFIXES = {
    "fluentd": "2025-03-10 13:52:10 +0000 kube.train: ",
    "journald": "Mar 10 13:52:10 gpu07 train.sh[4412]: ",
    "azure": "[2025-03-10T13:52:10.316Z] [worker-0]  ",
    "sagemaker": "[1,mpirank:0,algo-1]<stderr>:",
    "supervisor": "train:train_00 stderr | ",
    "airflow": "[2025-03-10, 13:52:10 UTC] {subprocess.py:93} INFO - ",
    "logger": "[2024-09-15 20:18:04] [INFO] ",
    "driver": "2023-09-14 21:27:58\t2023-09-14 21:27:58.000 [INFO] [Driver] ",
    "accelerate-test": "stderr: ",
}
STEP = (f"{SITE}/transformers/trainer.py", 2388, "_inner_training_loop", "tr_loss_step = self.training_step(model)")


def memory_on_rank_5() -> str:
    raised = traceback(
        "torch.OutOfMemoryError",
        "CUDA out of memory. Tried to allocate 3.63 GiB. GPU 5 has a total capacity of 79.11 GiB of which 2.71 GiB is free.",
        STEP,
        prefix="[rank5]: ",
    )
    return log(trainer(falling(5)), raised, torchrun_failed(1, rank=5, others=(0, 1)))


def own_exception() -> str:
    raised = traceback("ValueError", "too few columns", ("data.py", 3, "load", "rows"))
    return log(trainer(falling(5)), raised, stopped(1))


def two_streams() -> str:
    """The prefix differs between the lines of two tasks, and the second one has a traceback of its own."""
    raised = traceback("KeyError", "'prompt'", ("data.py", 3, "load", "row['prompt']"))
    lost = traceback("RuntimeError", "Connection closed by peer [10.0.0.3]:2049", ("t.py", 1, "x", "dist.barrier()"))
    return behind("[job a/3] ", log(raised)) + behind("[job b/4] ", log(lost))


def sentence_before_the_head() -> str:
    """A logger writes a sentence and the traceback below it: only the head has something before it."""
    raised = traceback("ValueError", "Expected input batch_size (8) to match target batch_size (7).", STEP)
    raised[0] = f"ERROR | 2024-08-29 06:16:31 | train has failed due to an exception: {raised[0]}"
    return log(trainer(falling(5)), raised)


CASES = (
    *(
        WrittenLog(
            name=f"collected-memory-{name}",
            text=behind(prefix, memory_on_rank_5()),
            primary="memory/gpu-oom-step",
            absent=("launch/user-exception",),
            line="OutOfMemoryError",
        )
        for name, prefix in PREFIXES.items()
    ),
    *(
        WrittenLog(
            name=f"collected-own-{name}",
            text=behind(prefix, own_exception()),
            primary="launch/user-exception",
            line="too few columns",
        )
        for name, prefix in PREFIXES.items()
    ),
    WrittenLog(
        name="collected-two-streams",
        text=two_streams(),
        primary="launch/user-exception",
        also=("launch/peer-failure",),
        line="KeyError",
    ),
    WrittenLog(
        name="quoted-then-killed",
        text=log(
            trainer(falling(9)),
            "Sample: Traceback (most recent call last):",
            "Sample: ValueError: bad",
            stopped(-9),
        ),
        primary="memory/host-oom-kill",
        absent=("launch/user-exception",),
    ),
    WrittenLog(
        name="collected-sentence",
        text=sentence_before_the_head(),
        primary="launch/user-exception",
        line="batch_size (8)",
    ),
)
