"""Logs of what only GPUs do: an allocator under pressure, streams that race."""

import json
import math

from tests.logs_real.written.parts import WrittenLog, ds, falling, finished, launched, log, trainer

FLUSHED = (
    "pytorch allocator cache flushes since last step. this happens when there is high memory pressure and is "
    "detrimental to performance. if this is happening frequently consider adjusting settings to reduce memory "
    "consumption. If you are unable to make the cache flushes go away consider adding "
    "get_accelerator().empty_cache() calls in your training loop to ensure that all ranks flush their caches at the "
    "same time"
)
RACED = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2, "overlap_comm": True}}


def flushing(times: int) -> list[str]:
    """DeepSpeed's warning at so many steps."""
    where = "stage3.py:2940:step"
    return [ds(f"{1 + step % 3} {FLUSHED}", second=step, level="WARNING", where=where) for step in range(times)]


def under_pressure() -> str:
    """The allocator gives its cache back in step after step; the loss falls all the same."""
    return log(launched(), flushing(8), trainer(falling(8)), flushing(12), trainer(falling(20), first=9), finished())


def flushed_once() -> str:
    """Once, at a longer batch, is nothing."""
    return log(launched(), trainer(falling(8)), flushing(1), trainer(falling(20), first=9), finished())


def raced() -> str:
    """From the fourth step on loss 0 and a norm of exactly the square root of two: -1 for each of two groups."""
    norms = [0.91, 0.88, 0.93, *[math.sqrt(2)] * 12]
    return log(launched(gpus=8), json.dumps(RACED, indent=4), trainer([2.7, 2.5, 2.4, *[0.0] * 12], norms=norms))


CASES = (
    WrittenLog(name="under-pressure", text=under_pressure(), primary="memory/allocator-pressure", line="flushes"),
    WrittenLog(name="flushed-once", text=flushed_once(), primary=None),
    WrittenLog(name="raced", text=raced(), primary="numerics/overlap-comm-race", accept=("numerics/loss-zero-is-nan",),
               also=("numerics/overlap-comm-race", "numerics/loss-zero-is-nan")),
)  # fmt: skip
