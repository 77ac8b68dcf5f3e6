"""How fast the ranks exchange: bus bandwidth a collective and size, pairs of ranks, and how fast each rank computes.

Bus bandwidth is the usual figure (NVIDIA's nccl-tests, PERFORMANCE.md): bytes over seconds, times a factor that makes
it comparable with the speed of the link whatever the number of ranks is. Imports torch; runs in rank processes only.
All figures are of this rank; what they mean together is for `comm.speeds`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import combinations
from statistics import median

import torch
import torch.distributed as dist

from dsdoctor.comm.collectives import Group

SECONDS = 0.15
"""Time spent on one collective and size, after one round that is not counted."""
_MOST_ROUNDS = 50
_PAIR_BYTES = 4 << 20
_MATRIX = 384

Measured = tuple[str, int, float]
"""What was measured (`all_reduce`, `pair 0-3`, `compute`), bytes a round, seconds a round."""


def collectives(group: Group, sizes: tuple[int, ...], finish: Callable[[], None]) -> Iterator[Measured]:
    """Every collective at every size in bytes. `finish` waits until the device has done what was queued."""
    width = torch.tensor([], dtype=group.dtype).element_size()
    for size in sizes:
        elements = max(group.size, size // width // group.size * group.size)
        whole = torch.ones(elements, device=group.device, dtype=group.dtype)
        part = torch.ones(elements // group.size, device=group.device, dtype=group.dtype)
        calls: dict[str, Callable[[], object]] = {
            "all_reduce": partial(dist.all_reduce, whole),
            "all_gather": partial(dist.all_gather_into_tensor, whole, part),
            "reduce_scatter": partial(dist.reduce_scatter_tensor, part, whole),
            "broadcast": partial(dist.broadcast, whole, src=0),
        }
        for name, call in calls.items():
            whole.fill_(0.0)  # sums of ones would grow out of the precision
            yield name, elements * width, _time(group, call, finish)


def pairs(group: Group, ranks: tuple[int, ...], finish: Callable[[], None]) -> Iterator[Measured]:
    """There and back between each two of `ranks`, one pair after another; the others wait."""
    tensor = torch.zeros(_PAIR_BYTES // 4, device=group.device, dtype=torch.float32)
    for low, high in combinations(ranks, 2):
        if group.rank in (low, high):
            seconds = _there_and_back(tensor, other=high if group.rank == low else low, first=group.rank == low)
            if group.rank == low:
                yield f"pair {low}-{high}", _PAIR_BYTES, seconds / 2
        finish()
        dist.barrier()


def compute(group: Group, finish: Callable[[], None]) -> Measured:
    """A product of matrices, the same on every rank: a slow device or a busy processor shows."""
    matrix = torch.ones(_MATRIX, _MATRIX, device=group.device, dtype=torch.float32)
    rounds = []
    for _ in range(5):
        start = time.perf_counter()
        torch.mm(matrix, matrix)
        finish()
        rounds.append(time.perf_counter() - start)
    return "compute", 0, median(rounds[1:])


def _there_and_back(tensor: torch.Tensor, *, other: int, first: bool, rounds: int = 3) -> float:
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        for sends in (first, not first):
            if sends:
                dist.send(tensor, other)
            else:
                dist.recv(tensor, other)
        if tensor.is_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return median(times[1:])


def _time(group: Group, call: Callable[[], object], finish: Callable[[], None]) -> float:
    """Seconds a round. All ranks make the same number of rounds: rank 0's first one decides how many."""
    call()
    finish()
    start = time.perf_counter()
    call()
    finish()
    wanted = torch.tensor([SECONDS / max(time.perf_counter() - start, 1e-6)], device=group.device)
    dist.broadcast(wanted, src=0)
    rounds = max(1, min(_MOST_ROUNDS, int(wanted)))
    start = time.perf_counter()
    for _ in range(rounds):
        call()
    finish()
    return (time.perf_counter() - start) / rounds
