"""Jobs that were started again in the same file: which attempt counts."""

from tests.logs_real.written.parts import (
    SITE,
    WrittenLog,
    behind,
    ds,
    falling,
    finished,
    launched,
    log,
    overflow,
    stopped,
    traceback,
    trainer,
)

END = "{'train_runtime': 812.4, 'train_samples_per_second': 12.1, 'train_loss': 1.61, 'epoch': 1.0}"
STEP = (f"{SITE}/transformers/trainer.py", 2388, "_inner_training_loop", "tr_loss_step = self.training_step(model)")
MEMORY = traceback("torch.OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB.", STEP)
OWN = traceback("KeyError", "'prompt'", ("data.py", 3, "load", "row['prompt']"))
MINIMUM = "Current loss scale already at minimum - cannot decrease scale anymore. Exiting run."
NAN = [*falling(20), *["nan"] * 10]
OMP = "W0511 10:00:00.118000 4000 torch/distributed/run.py:793] Setting OMP_NUM_THREADS environment variable for each process to be 1 in default"  # noqa: E501


def failed_twice(first: list[str], last: list[str], *, steps: int, begins: int, more: int) -> str:
    """The second attempt begins at a checkpoint, or at the first step, and shows `more` steps."""
    again = trainer(falling(more), first=begins)
    return log(launched(), trainer(falling(steps)), first, stopped(1), launched(), again, last, stopped(1))


def collapsed() -> list[str]:
    """Down to the floor, one step after the other."""
    lines = trainer(falling(3))
    for index, power in enumerate(range(16, 0, -1)):
        lines += [overflow(2**power, 2 ** (power - 1), second=index), *trainer([2.1], first=4 + index)]
    return [*lines, *traceback("Exception", MINIMUM, STEP), *stopped(1)]


def late_banner_of_a_node() -> str:
    """The other node starts later than the first one fails, and then only loses its peer."""
    lost = traceback("RuntimeError", "Connection closed by peer [10.0.0.1]:2049", ("t.py", 1, "x", "dist.barrier()"))
    return behind("node1: ", log(launched(), OWN)) + behind("node2: ", log(launched(), lost, stopped(1)))


def killed(pid: int) -> list[str]:
    return [*launched(), *trainer(falling(20)), f"run.sh: line 3: {pid} Killed                  deepspeed train.py"]


CASES = (
    WrittenLog(
        name="killed-in-both-attempts",
        text=log(killed(991), killed(1442)),
        primary="memory/host-oom-kill",
        line="1442 Killed",
    ),
    WrittenLog(
        name="resumed-and-failed-otherwise",
        text=failed_twice(MEMORY, OWN, steps=40, begins=21, more=15),
        primary="launch/user-exception",
        absent=("memory/gpu-oom-step",),
        line="KeyError",
    ),
    WrittenLog(
        name="begun-anew-and-failed-otherwise",
        text=failed_twice(OWN, MEMORY, steps=60, begins=1, more=20),
        primary="memory/gpu-oom-step",
        absent=("launch/user-exception",),
    ),
    # No step shows that what ended the first attempt is overcome: it is told, as the first failure of any log is.
    WrittenLog(
        name="failed-again-before-training",
        text=failed_twice(MEMORY, OWN, steps=40, begins=1, more=0),
        primary="memory/gpu-oom-step",
    ),
    WrittenLog(
        name="nan-then-well",
        text=log(
            [OMP, *trainer(NAN), "^C"],
            ds("Main process received SIGINT, exiting"),
            [OMP, *trainer(falling(60))],
            finished(),
        ),
        primary=None,
    ),
    WrittenLog(
        name="nan-to-the-end-then-another-job",
        text=log([OMP, *trainer(NAN), END, OMP, *trainer(falling(60)), END]),
        primary="numerics/nan-loss",
        line="nan",
    ),
    WrittenLog(
        name="nan-then-not-there-again",
        text=log([OMP, *trainer(NAN), OMP, *trainer(falling(5))]),
        primary="numerics/nan-loss",
        line="nan",
    ),
    WrittenLog(
        name="nan-then-twice-not-there-again",
        text=log([OMP, *trainer(NAN), OMP, *trainer(falling(5)), OMP, *trainer(falling(9))]),
        primary="numerics/nan-loss",
        line="nan",
    ),
    WrittenLog(
        name="collapse-then-well",
        text=log(["fp16=True", *launched(), *collapsed(), *launched(), *trainer(falling(60)), *finished()]),
        primary=None,
        absent=("loss-scale/collapse", "loss-scale/warmup"),
    ),
    WrittenLog(
        name="late-banner-of-a-node",
        text=late_banner_of_a_node(),
        primary="launch/user-exception",
        also=("launch/peer-failure",),
        line="KeyError",
    ),
)
